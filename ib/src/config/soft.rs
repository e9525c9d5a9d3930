//! Settings of the soft device.

use std::net::IpAddr;

use uct::{
    Result,
    config::{BytesAuto, Env, Units, Value, choices},
};

use super::{SOFT, conflict};
use crate::types::Mtu;

/// The MTU of the soft device; `None` for the largest that the network interface carries.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct SoftMtu(pub Option<Mtu>);

impl Value for SoftMtu {
    const FORMS: &'static str = "auto, 256, 512, 1024, 2048 or 4096";

    fn parse(text: &str) -> Result<Self, String> {
        let of = |mtu| SoftMtu(Some(mtu));
        choices(
            text,
            &[
                ("auto", SoftMtu(None)),
                ("256", of(Mtu::M256)),
                ("512", of(Mtu::M512)),
                ("1024", of(Mtu::M1024)),
                ("2048", of(Mtu::M2048)),
                ("4096", of(Mtu::M4096)),
            ],
        )
    }

    fn print(&self) -> String {
        self.0.map_or("auto".into(), |mtu| mtu.bytes().to_string())
    }
}

uct::config_table! {
    /// Settings of the soft device, which speaks RoCE v2 from user space over UDP. They are of this library, not of UCX.
    pub struct SoftSettings ("Soft device") {
        /// The IP address to use, one of this host's. Empty, with NETDEV empty too, for a loopback address of the device's
        /// own, by which only processes on the same host can reach it.
        addr: Option<IpAddr> = "ADDR", "";
        /// The network interface to use, by name; its first address is taken, IPv4 before IPv6. Cannot be combined with
        /// ADDR. Empty for none.
        netdev: String = "NETDEV", "";
        /// The UDP port. auto takes 4791 where it is free, else any. Kernel and hardware peers send to 4791 only; peers
        /// that use this library learn the port from the address.
        port: Units = "PORT", "auto",
            where |n| n.is_auto_or_at_most(65535) && *n != Units::Is(0), "must be auto or from 1 to 65535";
        /// The largest payload of a packet (MTU) in bytes. auto takes the largest that the network interface carries.
        mtu: SoftMtu = "MTU", "auto";
        /// How much kernel memory to ask for to keep received packets in. auto asks for 8m. The kernel may give less.
        rcvbuf: BytesAuto = "RCVBUF", "auto";
        /// Hand runs of packets to the kernel as one (UDP segmentation offload), which is much faster. Turns itself off
        /// where the kernel refuses.
        gso: bool = "GSO", "y";
        /// Write all frames to this capture file, for Wireshark. Slow. Empty for none.
        pcap: String = "PCAP", "";
    }
}

impl SoftSettings {
    /// Reads the settings.
    ///
    /// # Errors
    /// `InvalidConfig` for a value that does not parse, is out of range or contradicts another.
    pub fn from_env(env: &Env) -> Result<Self> {
        let config = Self::read(env, &SOFT)?;
        if config.addr.is_some() && !config.netdev.is_empty() {
            return Err(conflict("UCX_SOFT_ADDR", "UCX_SOFT_NETDEV"));
        }
        Ok(config)
    }
}
