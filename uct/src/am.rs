//! Receiving active messages: ids, handlers, and the descriptor a handler may keep.
//!
//! A handler gets an [`AmMessage`]: the bytes, and the right to keep them. If it returns without calling
//! [`AmMessage::into_owned`] the buffer goes back to the interface's pool. An owned [`AmDesc`] may live as long as the
//! user likes, even past the interface: its drop returns the buffer, or frees it if the pool is gone.

use std::{fmt, sync::Arc};

use crate::{
    error::{Error, ErrorKind, Result},
    mem::Buf,
    sync::{AtomicU64, Mutex, Ordering},
};

/// An active message id, 0 to 31.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct AmId(u8);

impl AmId {
    /// How many ids there are.
    pub const COUNT: usize = 32;

    /// The id `id`.
    ///
    /// # Errors
    /// `InvalidParam` above 31.
    pub fn new(id: u8) -> Result<AmId> {
        if (id as usize) < Self::COUNT {
            Ok(AmId(id))
        } else {
            Err(Error::new(ErrorKind::InvalidParam, format!("active message id {id}: ids are 0 to 31")))
        }
    }

    /// The low five bits of `id`, for ids that come from a five-bit field.
    pub const fn truncate(id: u8) -> AmId {
        AmId(id & 31)
    }

    /// The number.
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// Where owned descriptors return to. Implemented by transports.
pub trait DescPool: Send + Sync {
    /// Takes a buffer back. Must not block, and must not call user code.
    fn give_back(&self, buf: Buf);
}

/// What the received messages of an interface have in common.
pub struct AmHome {
    /// Where descriptors that handlers keep return to.
    pub pool: Arc<dyn DescPool>,
    /// Offset of the first payload byte in the buffer proper.
    pub offset: usize,
    /// Bytes before the payload that the handler may overwrite.
    pub headroom: usize,
}

impl fmt::Debug for AmHome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AmHome(offset {}, headroom {})", self.offset, self.headroom)
    }
}

/// A received active message, for the duration of the handler.
pub struct AmMessage<'a> {
    buf: &'a mut Option<Buf>,
    home: &'a AmHome,
    len: usize,
    ep: u64,
}

impl<'a> AmMessage<'a> {
    /// For transports: a message of `len` bytes in `buf`, which must hold a buffer; it is left there unless the handler keeps
    /// it.
    #[inline]
    pub fn new(buf: &'a mut Option<Buf>, home: &'a AmHome, len: usize, ep: u64) -> Self {
        debug_assert!(buf.is_some());
        AmMessage { buf, home, len, ep }
    }

    /// The payload.
    pub fn data(&self) -> &[u8] {
        match &*self.buf {
            Some(b) => &b[self.home.offset..self.home.offset + self.len],
            None => &[],
        }
    }

    /// The receiving interface's number of the endpoint it came by: for logs, and to tell senders apart.
    pub fn ep_id(&self) -> u64 {
        self.ep
    }

    /// Keeps the message. The bytes do not move.
    pub fn into_owned(self) -> AmDesc {
        let AmHome { pool, offset, headroom } = self.home;
        AmDesc { buf: self.buf.take(), pool: pool.clone(), offset: *offset, len: self.len, headroom: *headroom }
    }
}

impl fmt::Debug for AmMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AmMessage({} bytes)", self.len)
    }
}

/// A received message that its handler kept.
pub struct AmDesc {
    buf: Option<Buf>,
    pool: Arc<dyn DescPool>,
    offset: usize,
    len: usize,
    headroom: usize,
}

impl AmDesc {
    /// The payload. `data().as_ptr() + am_align_offset` is aligned as the interface was asked to.
    pub fn data(&self) -> &[u8] {
        match &self.buf {
            Some(b) => &b[self.offset..self.offset + self.len],
            None => &[],
        }
    }

    /// The headroom and the payload, for writing: `(headroom, data)`, adjacent in memory. The headroom has the length the
    /// interface was opened with.
    pub fn parts_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        let AmDesc { offset, len, headroom, .. } = *self;
        match &mut self.buf {
            Some(b) => {
                let start = b.front_len() + offset;
                let (head, tail) = b.whole_mut().split_at_mut(start);
                (&mut head[start - headroom..], &mut tail[..len])
            }
            None => (&mut [], &mut []),
        }
    }
}

impl Drop for AmDesc {
    fn drop(&mut self) {
        match self.buf.take() {
            Some(b) if b.is_here() => self.pool.give_back(b),
            // In a child nobody takes it, and a lock of the parent's may be in the way.
            Some(b) => std::mem::forget((b, self.pool.clone())),
            None => {}
        }
    }
}

impl fmt::Debug for AmDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AmDesc({} bytes)", self.len)
    }
}

/// What is called for a message.
pub type AmHandler = Arc<dyn Fn(AmMessage<'_>) + Send + Sync>;

/// On which thread a handler runs.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub enum HandlerKind {
    /// Only inside the user's `progress`. What arrives while the user is away is queued.
    Sync,
    /// Also on the progress thread, at any time.
    Async,
}

/// One entry of a [`HandlerTable`].
pub type HandlerEntry = Option<(AmHandler, HandlerKind)>;

/// The handlers of an interface. Replacing one takes effect at the next message; a handler that is running goes on to its
/// end.
pub struct HandlerTable {
    current: Mutex<Arc<[HandlerEntry; AmId::COUNT]>>,
    generation: AtomicU64,
}

impl HandlerTable {
    /// An empty table.
    pub fn new() -> Self {
        HandlerTable { current: Mutex::new(Arc::new([const { None }; AmId::COUNT])), generation: AtomicU64::new(0) }
    }

    /// Installs or, with `None`, removes a handler. The old one is returned, to be dropped with no lock held.
    pub fn set(&self, id: AmId, entry: HandlerEntry) -> HandlerEntry {
        let mut cur = self.current.lock();
        // Copy on write: batches in delivery keep the table they started with.
        let table = Arc::make_mut(&mut cur);
        let old = std::mem::replace(&mut table[id.get() as usize], entry);
        self.generation.fetch_add(1, Ordering::Release);
        old
    }

    /// Removes all. The old table is returned, to be dropped with no lock held.
    pub fn clear(&self) -> Arc<[HandlerEntry; AmId::COUNT]> {
        let old = std::mem::replace(&mut *self.current.lock(), Arc::new([const { None }; AmId::COUNT]));
        self.generation.fetch_add(1, Ordering::Release);
        old
    }

    /// Changes with every [`HandlerTable::set`]: a cheap way to see that a snapshot is old.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The table as it is now.
    pub fn snapshot(&self) -> Arc<[HandlerEntry; AmId::COUNT]> {
        self.current.lock().clone()
    }
}

impl Default for HandlerTable {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for HandlerTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = self.snapshot();
        f.debug_list().entries(t.iter().enumerate().filter(|(_, e)| e.is_some()).map(|(i, _)| i)).finish()
    }
}

/// A snapshot of a table that follows its changes: what who delivers keeps.
pub struct HandlerView {
    table: Arc<[HandlerEntry; AmId::COUNT]>,
    generation: u64,
}

impl HandlerView {
    /// The table as it is now.
    pub fn new(of: &HandlerTable) -> Self {
        // In this order: a change between the two is seen by the next look.
        let generation = of.generation();
        HandlerView { table: of.snapshot(), generation }
    }

    /// Takes the table that is in force. The one before comes back, to be dropped where user code may run. One load if
    /// nothing has changed.
    #[inline]
    pub fn refresh(&mut self, of: &HandlerTable) -> Option<Arc<[HandlerEntry; AmId::COUNT]>> {
        if of.generation() == self.generation { None } else { Some(self.renew(of)) }
    }

    #[cold]
    fn renew(&mut self, of: &HandlerTable) -> Arc<[HandlerEntry; AmId::COUNT]> {
        let new = HandlerView::new(of);
        std::mem::replace(self, new).table
    }

    /// The handlers.
    #[inline]
    pub fn table(&self) -> &[HandlerEntry; AmId::COUNT] {
        &self.table
    }
}

impl fmt::Debug for HandlerView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandlerView(generation {})", self.generation)
    }
}

#[cfg(all(test, uct_loom))]
mod loom;

#[cfg(all(test, not(uct_loom)))]
mod tests {
    use super::*;
    use crate::mem::{Arena, ArenaLayout};

    #[derive(Default)]
    struct Pool(Mutex<Vec<Buf>>);
    impl DescPool for Pool {
        fn give_back(&self, buf: Buf) {
            self.0.lock().push(buf);
        }
    }

    fn buf(front: usize) -> Buf {
        let l = ArenaLayout { count: 1, len: 64, front, align: 64, align_offset: 48 };
        Arena::new(l).unwrap().1.pop().unwrap()
    }

    #[test]
    fn ids_are_five_bits() {
        assert!(AmId::new(31).is_ok());
        let e = AmId::new(32).unwrap_err();
        assert_eq!(e.to_string(), "invalid parameter: active message id 32: ids are 0 to 31");
    }

    #[test]
    fn a_kept_descriptor_returns_to_its_pool() {
        let mem = Arc::new(Pool::default());
        let home = AmHome { pool: mem.clone(), offset: 48, headroom: 60 };
        let mut slot = Some(buf(16));
        slot.as_mut().unwrap()[48..52].copy_from_slice(b"abcd");
        let msg = AmMessage::new(&mut slot, &home, 4, 3);
        assert_eq!(msg.data(), b"abcd");
        let mut desc = msg.into_owned();
        assert!(slot.is_none());
        let (head, data) = desc.parts_mut();
        assert_eq!((head.len(), &*data), (60, &b"abcd"[..]));
        head.fill(0xff);
        assert_eq!(desc.data(), b"abcd");
        assert_eq!(desc.data().as_ptr() as usize % 64, 0);
        drop(desc);
        assert_eq!(mem.0.lock().len(), 1);
    }

    #[test]
    fn a_snapshot_does_not_see_later_changes() {
        let t = HandlerTable::new();
        let id = AmId::new(5).unwrap();
        assert!(t.set(id, Some((Arc::new(|_| {}), HandlerKind::Sync))).is_none());
        let s = t.snapshot();
        assert!(t.set(id, None).is_some());
        assert!(s[5].is_some() && t.snapshot()[5].is_none());
    }
}
