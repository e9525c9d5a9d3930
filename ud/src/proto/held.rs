//! Packets kept beyond a gap: a ring of a power of two of places, indexed by PSN.

use super::psn::Psn;

/// What is kept.
pub(super) enum Kept<R> {
    /// An active message in a buffer of the glue's.
    Am(u8, R),
    /// An empty PUT: nothing to keep but its place in the order.
    Put,
}

/// The kept packets of one endpoint. All PSNs in it lie within `places.len()` of the head, which the caller checks.
pub(super) struct Held<R> {
    places: Box<[Option<Kept<R>>]>,
    count: usize,
}

impl<R> Held<R> {
    /// `places`: a power of two.
    pub(super) fn new(places: usize) -> Self {
        Held { places: (0..places).map(|_| None).collect(), count: 0 }
    }

    fn index(&self, psn: Psn) -> usize {
        usize::from(psn.raw()) & (self.places.len() - 1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn has(&self, psn: Psn) -> bool {
        self.places[self.index(psn)].is_some()
    }

    /// Keeps a packet, unless its place is taken: then it comes back.
    pub(super) fn insert(&mut self, psn: Psn, kept: Kept<R>) -> Option<Kept<R>> {
        let i = self.index(psn);
        if self.places[i].is_some() {
            return Some(kept);
        }
        self.places[i] = Some(kept);
        self.count += 1;
        None
    }

    pub(super) fn take(&mut self, psn: Psn) -> Option<Kept<R>> {
        let i = self.index(psn);
        let kept = self.places[i].take()?;
        self.count -= 1;
        Some(kept)
    }

    /// Empties the ring.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Kept<R>> {
        self.count = 0;
        self.places.iter_mut().filter_map(Option::take)
    }

    /// Bit `i` is set if `head + 1 + i` is here.
    pub(super) fn bitmap(&self, head: Psn) -> u64 {
        let mut bits = 0;
        // Place of `head` itself is free for a PSN one round on only beyond the ring, which the caller never keeps.
        for i in 0..(self.places.len() as u16) {
            if self.has(head.add(1 + i)) {
                bits |= 1 << i;
            }
        }
        bits
    }
}
