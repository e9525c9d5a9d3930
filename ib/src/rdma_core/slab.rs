//! Who owns a posted receive: the buffer stays here while the device may write it, and comes out once, by the number that
//! its work request carries.
//!
//! Numbers count up and are never used twice, so that a completion of before a reset names nothing. A queue pair serves its
//! receives in order, so the places go round as a ring; a place that is not free when its turn comes counts as full.

use uct::mem::Buf;

/// Buffers by work request number.
pub(super) struct RecvSlab {
    /// A power of two of them; the number's low bits say which.
    places: Box<[Option<Buf>]>,
    depth: usize,
    len: usize,
    /// The number of the next buffer.
    next: u64,
}

impl RecvSlab {
    /// Room for `depth` buffers.
    pub(super) fn new(depth: u32) -> Self {
        let depth = depth as usize;
        let places = (0..depth.next_power_of_two()).map(|_| None).collect();
        RecvSlab { places, depth, len: 0, next: 0 }
    }

    #[inline]
    fn place(&mut self, id: u64) -> &mut Option<Buf> {
        // There is at least one place, and their number is a power of two.
        let mask = self.places.len() - 1;
        &mut self.places[id as usize & mask]
    }

    /// True if nothing more fits.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len >= self.depth
    }

    /// Puts a buffer in and answers its number, or gives it back if there is no room.
    #[inline]
    pub(super) fn insert(&mut self, buf: Buf) -> Result<u64, Buf> {
        let id = self.next;
        if self.is_full() || self.place(id).is_some() {
            return Err(buf);
        }
        *self.place(id) = Some(buf);
        self.next += 1;
        self.len += 1;
        Ok(id)
    }

    /// Takes the buffer of this number out; `None` if there is none or the number is of before the last drain.
    #[inline]
    pub(super) fn take(&mut self, id: u64) -> Option<Buf> {
        // A number that is older than the ring is long has been taken or drained: its place is another buffer's. A younger one
        // has its place to itself.
        let newer = self.next.wrapping_sub(id).wrapping_sub(1);
        if newer >= self.places.len() as u64 {
            return None;
        }
        let buf = self.place(id).take()?;
        self.len -= 1;
        Some(buf)
    }

    /// Takes everything out, in no particular order; numbers of before name nothing any more.
    pub(super) fn drain(&mut self) -> Vec<Buf> {
        self.len = 0;
        self.places.iter_mut().filter_map(Option::take).collect()
    }

    /// How many buffers are in it.
    pub(super) fn len(&self) -> usize {
        self.len
    }
}
