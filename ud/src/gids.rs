//! The addresses that count as this interface's own: which packets are for us.

use ib::{device::GRH_LEN, types::Gid};

/// The GIDs of the port, and the one that the last packet was sent to.
///
/// Foreign packets arrive by flooding and multicast; nearly all others go to the same address.
pub(crate) struct OwnGids {
    all: Vec<Gid>,
    /// One of `all`; if that is empty the unspecified address, which no packet is sent to.
    last: u128,
}

impl OwnGids {
    pub(crate) fn new(all: Vec<Gid>) -> Self {
        let last = all.first().map_or(0, |g| u128::from_be_bytes(g.0));
        OwnGids { all, last }
    }

    pub(crate) fn contains(&self, gid: &Gid) -> bool {
        self.all.contains(gid)
    }

    /// True if the destination in a packet's GRH area is that of the packet before.
    #[inline]
    pub(crate) fn is_same(&self, grh: &[u8; GRH_LEN]) -> bool {
        destination(grh) == self.last
    }

    /// True if the destination in a packet's GRH area is ours.
    pub(crate) fn is_ours(&mut self, grh: &[u8; GRH_LEN]) -> bool {
        let destination = destination(grh);
        let is_ours = self.all.contains(&Gid(destination.to_be_bytes()));
        if is_ours {
            self.last = destination;
        }
        is_ours
    }
}

/// The destination as a number: of an IPv6 header that fills the area, or of the IPv4 header in its last 20 bytes, mapped.
#[inline]
fn destination(grh: &[u8; GRH_LEN]) -> u128 {
    let [first, .., a, b, c, d] = *grh;
    if first >> 4 == 6
        && let Some(address) = grh.last_chunk()
    {
        return u128::from_be_bytes(*address);
    }
    0xffff_0000_0000 | u128::from(u32::from_be_bytes([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grh(gid: Gid) -> [u8; GRH_LEN] {
        let mut grh = [0xee; GRH_LEN];
        if gid.0[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff] {
            // The first 20 bytes are undefined, but say that they are no IPv6 header.
            grh[36..].copy_from_slice(&gid.0[12..]);
        } else {
            grh[0] = 0x60;
            grh[24..].copy_from_slice(&gid.0);
        }
        grh
    }

    #[test]
    fn packets_to_any_of_the_addresses_are_ours() {
        let (v4, v6, other) = ("10.0.0.1", "fe80::1", "10.0.0.2");
        let gid = |s: &str| Gid::from_ip(s.parse().unwrap());
        let mut own = OwnGids::new(vec![gid(v4), gid(v6)]);
        for (to, ours) in [(v4, true), (v6, true), (other, false), ("fe80::2", false), (v4, true)] {
            assert_eq!(own.is_ours(&grh(gid(to))), ours, "{to}");
            assert_eq!(own.is_same(&grh(gid(to))), ours, "{to}: the last of ours stays");
        }
        assert!(!own.is_same(&grh(gid(v6))));
        let mut none = OwnGids::new(Vec::new());
        assert!(!none.is_ours(&grh(gid(v4))) && !none.is_same(&grh(gid(v4))));
    }
}
