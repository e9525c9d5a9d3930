//! Who owns a posted receive: the buffer stays here while the device may write it, and comes out once, by the number that
//! its work request carries.
//!
//! A number is a place and a generation. The generation moves when the queue pair is reset, so that a completion of before
//! names nothing.

use uct::mem::Buf;

/// Buffers by work request number.
pub(super) struct RecvSlab {
    places: Box<[Option<Buf>]>,
    free: Vec<u32>,
    generation: u32,
}

impl RecvSlab {
    /// Room for `depth` buffers.
    pub(super) fn new(depth: u32) -> Self {
        RecvSlab { places: (0..depth).map(|_| None).collect(), free: (0..depth).rev().collect(), generation: 0 }
    }

    /// True if nothing more fits.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Puts a buffer in and answers its number, or gives it back if there is no room.
    #[inline]
    pub(super) fn insert(&mut self, buf: Buf) -> Result<u64, Buf> {
        let Some(place) = self.free.pop() else { return Err(buf) };
        self.places[place as usize] = Some(buf);
        Ok(u64::from(self.generation) << 32 | u64::from(place))
    }

    /// Takes the buffer of this number out; `None` if there is none or the number is of an earlier generation.
    #[inline]
    pub(super) fn take(&mut self, id: u64) -> Option<Buf> {
        let (generation, place) = ((id >> 32) as u32, id as u32);
        if generation != self.generation {
            return None;
        }
        let buf = self.places.get_mut(place as usize)?.take()?;
        self.free.push(place);
        Some(buf)
    }

    /// Takes everything out, in no particular order, and begins a new generation.
    pub(super) fn drain(&mut self) -> Vec<Buf> {
        self.generation = self.generation.wrapping_add(1);
        let mut all = Vec::new();
        for (place, slot) in (0u32..).zip(&mut self.places) {
            if let Some(buf) = slot.take() {
                self.free.push(place);
                all.push(buf);
            }
        }
        all
    }

    /// How many buffers are in it.
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }
}
