//! What a simulated device is, and what a simulated link does to packets.

use std::{fmt, net::IpAddr};

use crate::{
    device::{LinkLayer, RoceVersion, SoftIdentity},
    sw::LongMessage,
    types::{Gid, Lid, Mtu},
};

/// A device's place in its network, counted from 0 in the order of [`SimNet::add_device`](super::SimNet::add_device).
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

/// A link address, 48 bits.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub u64);

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mac({:012x})", self.0)
    }
}

/// What happens to packets on their way. Probabilities are in parts per million, times in nanoseconds. The default is a
/// link of 1 us that loses nothing and keeps the order.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Faults {
    /// Probability that a packet is lost.
    pub loss_ppm: u32,
    /// Probability that it arrives twice; each copy has its own delay.
    pub dup_ppm: u32,
    /// Probability that it is late by `reorder_ns`, so that later ones overtake it.
    pub reorder_ppm: u32,
    /// See `reorder_ppm`.
    pub reorder_ns: u64,
    /// Delay of every packet.
    pub delay_ns: u64,
    /// Largest additional delay, drawn evenly for each packet. Packets overtake one another if it is above the time
    /// between them.
    pub jitter_ns: u64,
    /// Probability that a bit of the payload flips (of a packet that has payload). A checksum guards UD: the packet is
    /// dropped, unless `corrupt_passes`.
    pub corrupt_ppm: u32,
    /// Let corrupted packets through, as if the damage had been done behind the checksum.
    pub corrupt_passes: bool,
    /// Nothing arrives. As a fault of one link it is a one-way partition.
    pub partition: bool,
    /// Probability that the receiver has, for this packet, no receive posted.
    pub no_receive_ppm: u32,
}

impl Default for Faults {
    fn default() -> Self {
        Faults {
            loss_ppm: 0,
            dup_ppm: 0,
            reorder_ppm: 0,
            reorder_ns: 10_000,
            delay_ns: 1_000,
            jitter_ns: 0,
            corrupt_ppm: 0,
            corrupt_passes: false,
            partition: false,
            no_receive_ppm: 0,
        }
    }
}

/// A simulated device.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// The verbs name.
    pub name: String,
    /// The GID table.
    pub gids: Vec<(Gid, RoceVersion)>,
    /// Kind of network. On InfiniBand packets without GRH find their way by LID.
    pub link_layer: LinkLayer,
    /// Local identifier (InfiniBand).
    pub lid: Lid,
    /// MTU in force.
    pub mtu: Mtu,
    /// The extra identity of soft devices; `None` makes peers see a device like any NIC. Two devices of one GID are told
    /// apart by its UDP port, which counts as 4791 where there is none.
    pub soft: Option<SoftIdentity>,
    /// Link address; `None` takes that of an earlier device with one of the same GIDs, or else a new one.
    pub mac: Option<Mac>,
    /// Address handles that can be alive, 0 for any number; one more is `ENOMEM`.
    pub ah_max: usize,
    /// What [`DeviceAttr::ah_create_sleeps`](crate::device::DeviceAttr::ah_create_sleeps) says. The call itself never
    /// sleeps: with true, an address-handle cache defers it to its job queue, and the test says when that runs.
    pub ah_create_sleeps: bool,
    /// `None`: sends are copied and complete when they are rung. `Some((min, max))`: the device reads the buffer, and
    /// completes the send, that many nanoseconds later, drawn evenly for each, in order.
    pub late_sends: Option<(u64, u64)>,
    /// What a message longer than the posted receive does.
    pub long_message: LongMessage,
    /// Inline bytes per send that a queue pair can have; one that wants more gets this many.
    pub inline_max: u32,
    /// Scatter/gather elements per send that a queue pair can have; one that wants more is refused with `EINVAL`.
    pub sge_max: u32,
    /// Sends or receives that a queue pair can have outstanding; one that wants more is refused with `EINVAL`.
    pub depth_max: u32,
    /// Sends that wait for a ring; 1 sends each at once. Above it, the first that is over the limit rings by itself.
    pub send_batch: u32,
    /// Queue pairs that can be alive.
    pub qp_max: usize,
    /// Registrations that can be alive.
    pub mr_max: usize,
    /// True if event fds work.
    pub events: bool,
    /// Bandwidth to report, bytes per second. It does not slow packets down.
    pub bandwidth_bps: f64,
}

impl SimConfig {
    /// A RoCE v2 device with this address: MTU 4096, 64 bytes inline, 4 elements, kernel semantics, no soft identity.
    pub fn new(name: impl Into<String>, ip: IpAddr) -> Self {
        SimConfig {
            name: name.into(),
            gids: vec![(Gid::from_ip(ip), RoceVersion::V2)],
            link_layer: LinkLayer::Ethernet,
            lid: Lid(0),
            mtu: Mtu::M4096,
            soft: None,
            mac: None,
            ah_max: 0,
            ah_create_sleeps: false,
            late_sends: None,
            long_message: LongMessage::Error,
            inline_max: 64,
            sge_max: 4,
            depth_max: 32_768,
            send_batch: 1,
            qp_max: 1024,
            mr_max: usize::MAX,
            events: true,
            bandwidth_bps: 12.5e9,
        }
    }

    /// An InfiniBand device with this LID and no GID but the link-local one made of it.
    pub fn infiniband(name: impl Into<String>, lid: u16) -> Self {
        let mut gid = [0; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[8] = 2;
        gid[14..].copy_from_slice(&lid.to_be_bytes());
        SimConfig {
            gids: vec![(Gid(gid), RoceVersion::V2)],
            link_layer: LinkLayer::InfiniBand,
            lid: Lid(lid),
            ..SimConfig::new(name, IpAddr::from([0, 0, 0, 0]))
        }
    }
}
