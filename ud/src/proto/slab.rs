//! A vector with holes: values keep their index until they are removed, removed places are used again.

use std::ops::{Index, IndexMut};

/// "No index".
pub(super) const NIL: u32 = u32::MAX;

enum Place<V> {
    Used(V),
    Free { next: u32 },
}

/// Values by stable `u32` index. Insert and remove are O(1); memory is kept for reuse.
pub(super) struct Slab<V> {
    places: Vec<Place<V>>,
    free: u32,
    len: usize,
}

impl<V> Slab<V> {
    pub(super) const fn new() -> Self {
        Slab { places: Vec::new(), free: NIL, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The index the next [`Slab::insert`] will use.
    pub(super) fn vacant(&self) -> u32 {
        if self.free == NIL { self.places.len() as u32 } else { self.free }
    }

    pub(super) fn insert(&mut self, v: V) -> u32 {
        let i = self.vacant();
        match self.places.get_mut(i as usize) {
            Some(place) => {
                if let Place::Free { next } = *place {
                    self.free = next;
                }
                *place = Place::Used(v);
            }
            None => self.places.push(Place::Used(v)),
        }
        self.len += 1;
        i
    }

    pub(super) fn remove(&mut self, i: u32) -> Option<V> {
        let place = self.places.get_mut(i as usize)?;
        if matches!(place, Place::Free { .. }) {
            return None;
        }
        match std::mem::replace(place, Place::Free { next: self.free }) {
            Place::Used(v) => {
                self.free = i;
                self.len -= 1;
                Some(v)
            }
            Place::Free { .. } => None,
        }
    }

    #[inline]
    pub(super) fn get(&self, i: u32) -> Option<&V> {
        match self.places.get(i as usize) {
            Some(Place::Used(v)) => Some(v),
            _ => None,
        }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, i: u32) -> Option<&mut V> {
        match self.places.get_mut(i as usize) {
            Some(Place::Used(v)) => Some(v),
            _ => None,
        }
    }

    /// All values with their indexes, in index order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &V)> {
        self.places.iter().enumerate().filter_map(|(i, p)| match p {
            Place::Used(v) => Some((i as u32, v)),
            Place::Free { .. } => None,
        })
    }
}

/// Indexing is for indexes the engine itself handed out and has not removed; a wrong one is a bug of the engine, not of a peer.
impl<V> Index<u32> for Slab<V> {
    type Output = V;
    #[inline(always)]
    fn index(&self, i: u32) -> &V {
        match &self.places[i as usize] {
            Place::Used(v) => v,
            Place::Free { .. } => removed(i),
        }
    }
}

impl<V> IndexMut<u32> for Slab<V> {
    #[inline(always)]
    fn index_mut(&mut self, i: u32) -> &mut V {
        match &mut self.places[i as usize] {
            Place::Used(v) => v,
            Place::Free { .. } => removed(i),
        }
    }
}

#[cold]
#[inline(never)]
fn removed(i: u32) -> ! {
    panic!("index {i} of a removed value")
}
