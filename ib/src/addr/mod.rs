//! Addresses as they travel between processes: [`DeviceAddr`], [`IfaceAddr`] and [`EpAddr`], byte for byte those of UCX.
//!
//! A device address is UCX's, followed for soft devices by a [`Trailer`] of ours. UCX takes no length and does not look
//! beyond its own part, so it never sees the trailer; an address without one comes from UCX or from hardware.
//!
//! Parsing takes bytes from strangers. Every byte string gives an address or a reason; nothing here panics or allocates.
//! [`ah_attr`] turns an address into what an address handle is made of.

mod ah;
mod trailer;

use std::fmt;

pub use ah::ah_attr;
pub(crate) use ah::{check_loopback, flid};
pub use trailer::{Features, Trailer};

use crate::{
    device::RoceVersion,
    types::{Gid, Lid, Mtu, PKey, Qpn},
};

/// The UDP port of RoCE v2.
pub const ROCE_V2_PORT: u16 = 4791;

/// The subnet prefix of InfiniBand ports that nobody configured, fe80::/64.
pub const DEFAULT_SUBNET: [u8; 8] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0];

const GID_INDEX: u8 = 1 << 0;
const PATH_MTU: u8 = 1 << 1;
const PKEY: u8 = 1 << 2;
const ETHERNET: u8 = 1 << 3;
const ETH_IPV6: u8 = 1 << 4;
const ETH_VERSION_SHIFT: u32 = 5;
const IB_SUBNET16: u8 = 1 << 4;
const IB_SUBNET64: u8 = 1 << 5;
const IB_IF_ID: u8 = 1 << 6;

/// Why bytes are not an address.
#[derive(Copy, Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AddrError {
    /// Fewer bytes than the flags promise.
    #[error("the address is cut off after {have} of {need} or more bytes")]
    Truncated {
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// Both forms of a subnet prefix at once.
    #[error("the address carries two subnet prefixes (flags {0:#04x})")]
    TwoSubnets(u8),
    /// A RoCE version that does not exist.
    #[error("the address carries RoCE version code {0}, known are 0 to 3")]
    RoceVersion(u8),
    /// A path MTU code that does not exist.
    #[error("the address carries path MTU code {0}, known are 1 to 5")]
    Mtu(u8),
    /// A GID with interface id 0, which no port has.
    #[error("the address carries a GID without an interface id")]
    EmptyGid,
    /// A trailer shorter than its version promises.
    #[error("the trailer of the address is {0} bytes long, which is too short")]
    Trailer(u8),
    /// Bytes left over behind an address of fixed length.
    #[error("the address is {have} bytes long instead of {need}")]
    Length {
        /// The right length.
        need: usize,
        /// The length there is.
        have: usize,
    },
}

impl From<AddrError> for uct::Error {
    fn from(e: AddrError) -> Self {
        uct::Error::new(uct::ErrorKind::InvalidAddress, e.to_string())
    }
}

/// The RoCE version in a device address.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum AddrVersion {
    /// RoCE v1.
    V1 = 0,
    /// RoCE v1.5, which no device speaks today.
    V1_5 = 1,
    /// RoCE v2.
    V2 = 2,
    /// Any: the sender does not know or does not care.
    Any = 3,
}

impl From<RoceVersion> for AddrVersion {
    fn from(v: RoceVersion) -> Self {
        match v {
            RoceVersion::V1 => AddrVersion::V1,
            RoceVersion::V2 => AddrVersion::V2,
            RoceVersion::Unknown => AddrVersion::Any,
        }
    }
}

impl fmt::Display for AddrVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AddrVersion::V1 => "RoCE v1",
            AddrVersion::V1_5 => "RoCE v1.5",
            AddrVersion::V2 => "RoCE v2",
            AddrVersion::Any => "any RoCE version",
        })
    }
}

/// The part of a device address that depends on the link layer.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub enum LinkAddr {
    /// RoCE.
    Ethernet {
        /// The peer's GID.
        gid: Gid,
        /// The version it speaks.
        version: AddrVersion,
    },
    /// InfiniBand.
    InfiniBand {
        /// The peer's LID, without path bits.
        lid: Lid,
        /// Its subnet prefix; [`DEFAULT_SUBNET`] if the address carried none.
        prefix: [u8; 8],
        /// Its interface id, if the address carried one. Without it, it cannot be addressed globally.
        if_id: Option<[u8; 8]>,
    },
}

/// The address of a device: which port, and what a peer must know of it.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub struct DeviceAddr {
    /// Where it is.
    pub link: LinkAddr,
    /// Its partition; the default if the address carried none.
    pub pkey: PKey,
    /// The largest packet it takes; 4096 if the address carried none.
    pub path_mtu: Mtu,
    /// The index of the local GID to be used towards it, if it asks for one. UCX's interfaces never do.
    pub gid_index: Option<u8>,
    /// What devices of ours add; `None` for UCX and hardware.
    pub trailer: Option<Trailer>,
}

/// Takes bytes off the front of a slice.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], AddrError> {
        let end = self.at + N;
        let piece = self.bytes.get(self.at..end).and_then(|s| s.try_into().ok());
        let piece = piece.ok_or(AddrError::Truncated { need: end, have: self.bytes.len() })?;
        self.at = end;
        Ok(piece)
    }

    fn byte(&mut self) -> Result<u8, AddrError> {
        self.take::<1>().map(|[b]| b)
    }
}

/// True for fec0:0:0:x, of which UCX sends only x.
fn is_site_local(prefix: [u8; 8]) -> bool {
    prefix[..6] == [0xfe, 0xc0, 0, 0, 0, 0]
}

impl DeviceAddr {
    /// The longest packed address.
    pub const MAX_LEN: usize = 23 + Trailer::LEN;

    /// Reads an address from the front of `bytes` and tells how many of them it takes. What follows is left alone.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn parse(bytes: &[u8]) -> Result<(DeviceAddr, usize), AddrError> {
        let mut r = Reader { bytes, at: 0 };
        let flags = r.byte()?;
        let link =
            if flags & ETHERNET != 0 { parse_ethernet(flags, &mut r)? } else { parse_infiniband(flags, &mut r)? };
        let path_mtu = match flags & PATH_MTU {
            0 => Mtu::M4096,
            _ => {
                let code = r.byte()?;
                Mtu::from_code(code).ok_or(AddrError::Mtu(code))?
            }
        };
        let gid_index = if flags & GID_INDEX != 0 { Some(r.byte()?) } else { None };
        let pkey = if flags & PKEY != 0 { PKey(u16::from_le_bytes(r.take()?)) } else { PKey::DEFAULT };
        let base_len = r.at;
        let (trailer, trailer_len) = Trailer::parse(&bytes[base_len..])?;
        Ok((DeviceAddr { link, pkey, path_mtu, gid_index, trailer }, base_len + trailer_len))
    }

    /// Reads an address that fills `bytes`.
    ///
    /// # Errors
    /// The first thing that is wrong; `Length` if bytes are left over.
    pub fn parse_exact(bytes: &[u8]) -> Result<DeviceAddr, AddrError> {
        let (addr, need) = Self::parse(bytes)?;
        if need != bytes.len() {
            return Err(AddrError::Length { need, have: bytes.len() });
        }
        Ok(addr)
    }

    /// Appends the packed address to `out`: [`DeviceAddr::packed_len`] bytes.
    pub fn pack(&self, out: &mut Vec<u8>) {
        let mut flags = 0;
        if self.path_mtu != Mtu::M4096 {
            flags |= PATH_MTU;
        }
        if self.gid_index.is_some() {
            flags |= GID_INDEX;
        }
        if self.pkey != PKey::DEFAULT {
            flags |= PKEY;
        }
        match self.link {
            LinkAddr::Ethernet { gid, version } => {
                flags |= ETHERNET | (version as u8) << ETH_VERSION_SHIFT;
                flags |= if gid.is_ipv4() { 0 } else { ETH_IPV6 };
                out.push(flags);
                out.extend_from_slice(&gid.0);
            }
            LinkAddr::InfiniBand { lid, prefix, if_id } => {
                let subnet: &[u8] = if prefix == DEFAULT_SUBNET {
                    &[]
                } else if is_site_local(prefix) {
                    flags |= IB_SUBNET16;
                    &prefix[6..]
                } else {
                    flags |= IB_SUBNET64;
                    &prefix
                };
                flags |= if if_id.is_some() { IB_IF_ID } else { 0 };
                out.push(flags);
                out.extend_from_slice(&lid.0.to_le_bytes());
                out.extend_from_slice(if_id.as_ref().map_or(&[], |id| id.as_slice()));
                out.extend_from_slice(subnet);
            }
        }
        if flags & PATH_MTU != 0 {
            out.push(self.path_mtu as u8);
        }
        out.extend(self.gid_index);
        if flags & PKEY != 0 {
            out.extend_from_slice(&self.pkey.0.to_le_bytes());
        }
        if let Some(trailer) = &self.trailer {
            trailer.pack(out);
        }
    }

    /// The packed address.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::MAX_LEN);
        self.pack(&mut out);
        out
    }

    /// How many bytes [`DeviceAddr::pack`] writes.
    pub fn packed_len(&self) -> usize {
        let link = match self.link {
            LinkAddr::Ethernet { .. } => 16,
            LinkAddr::InfiniBand { prefix, if_id, .. } => {
                let subnet = match prefix {
                    DEFAULT_SUBNET => 0,
                    p if is_site_local(p) => 2,
                    _ => 8,
                };
                2 + subnet + if_id.map_or(0, |id| id.len())
            }
        };
        let mtu = usize::from(self.path_mtu != Mtu::M4096);
        let index = usize::from(self.gid_index.is_some());
        let pkey = if self.pkey == PKey::DEFAULT { 0 } else { 2 };
        1 + link + mtu + index + pkey + self.trailer.map_or(0, |_| Trailer::LEN)
    }

    /// The peer's GID, if the address tells it.
    pub fn gid(&self) -> Option<Gid> {
        match self.link {
            LinkAddr::Ethernet { gid, .. } => Some(gid),
            LinkAddr::InfiniBand { prefix, if_id, .. } => {
                let if_id = if_id?;
                let mut gid = [0; 16];
                gid[..8].copy_from_slice(&prefix);
                gid[8..].copy_from_slice(&if_id);
                Some(Gid(gid))
            }
        }
    }

    /// The UDP port of the peer's device.
    pub fn udp_port(&self) -> u16 {
        self.trailer.map_or(ROCE_V2_PORT, |t| t.soft.udp_port)
    }
}

impl fmt::Display for DeviceAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.link, self.gid()) {
            (LinkAddr::Ethernet { gid, version }, _) => write!(f, "gid {gid} ({version})")?,
            (LinkAddr::InfiniBand { lid, .. }, Some(gid)) => write!(f, "lid {} gid {gid}", lid.0)?,
            (LinkAddr::InfiniBand { lid, .. }, None) => write!(f, "lid {}", lid.0)?,
        }
        match self.trailer {
            Some(t) => write!(f, " udp port {}", t.soft.udp_port),
            None => Ok(()),
        }
    }
}

fn parse_ethernet(flags: u8, r: &mut Reader<'_>) -> Result<LinkAddr, AddrError> {
    let version = match flags >> ETH_VERSION_SHIFT {
        0 => AddrVersion::V1,
        1 => AddrVersion::V1_5,
        2 => AddrVersion::V2,
        3 => AddrVersion::Any,
        other => return Err(AddrError::RoceVersion(other)),
    };
    let gid = Gid(r.take()?);
    if !gid.is_valid() {
        return Err(AddrError::EmptyGid);
    }
    // The IPv6 flag only repeats what the GID says, so the GID is what counts.
    Ok(LinkAddr::Ethernet { gid, version })
}

fn parse_infiniband(flags: u8, r: &mut Reader<'_>) -> Result<LinkAddr, AddrError> {
    if flags & (IB_SUBNET16 | IB_SUBNET64) == IB_SUBNET16 | IB_SUBNET64 {
        return Err(AddrError::TwoSubnets(flags));
    }
    let lid = Lid(u16::from_le_bytes(r.take()?));
    let if_id = if flags & IB_IF_ID != 0 { Some(r.take::<8>()?) } else { None };
    if if_id == Some([0; 8]) {
        return Err(AddrError::EmptyGid);
    }
    let prefix = if flags & IB_SUBNET16 != 0 {
        let [a, b] = r.take()?;
        [0xfe, 0xc0, 0, 0, 0, 0, a, b]
    } else if flags & IB_SUBNET64 != 0 {
        r.take()?
    } else {
        DEFAULT_SUBNET
    };
    Ok(LinkAddr::InfiniBand { lid, prefix, if_id })
}

/// The address of an interface: its queue pair.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub struct IfaceAddr {
    /// The queue pair.
    pub qpn: Qpn,
}

impl IfaceAddr {
    /// Bytes of the packed form.
    pub const LEN: usize = 3;

    /// The packed form.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        self.qpn.to_le24()
    }

    /// Reads an address that fills `bytes`.
    ///
    /// # Errors
    /// `Length` for any other number of bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, AddrError> {
        let exact: [u8; Self::LEN] = exact(bytes)?;
        Ok(IfaceAddr { qpn: Qpn::from_le24(exact) })
    }
}

/// The address of an endpoint: its interface's queue pair and its number there.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub struct EpAddr {
    /// The queue pair.
    pub qpn: Qpn,
    /// The endpoint's number, 24 bits; higher bits are dropped in packing.
    pub ep_id: u32,
}

impl EpAddr {
    /// Bytes of the packed form.
    pub const LEN: usize = 6;

    /// The packed form.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let [a, b, c] = self.qpn.to_le24();
        let [d, e, f, _] = self.ep_id.to_le_bytes();
        [a, b, c, d, e, f]
    }

    /// Reads an address that fills `bytes`.
    ///
    /// # Errors
    /// `Length` for any other number of bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, AddrError> {
        let [a, b, c, d, e, f]: [u8; Self::LEN] = exact(bytes)?;
        Ok(EpAddr { qpn: Qpn::from_le24([a, b, c]), ep_id: u32::from_le_bytes([d, e, f, 0]) })
    }
}

fn exact<const N: usize>(bytes: &[u8]) -> Result<[u8; N], AddrError> {
    bytes.try_into().map_err(|_| AddrError::Length { need: N, have: bytes.len() })
}

#[cfg(test)]
mod tests;
