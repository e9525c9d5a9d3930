//! Memory that a device reads and writes: [`Block`], the [`Arena`] of equal buffers cut from it, and the unique handle
//! [`Buf`] to one of them. Start reading at [`Arena`].
//!
//! Ownership is the safety argument, so it is short:
//!
//! - **M1** A [`Block`] owns its bytes, which stay at one address until the last `Arc` to it is dropped.
//! - **M2** An [`Arena`] cuts a block into ranges that do not overlap, and makes exactly one [`Buf`] for each.
//! - **M3** A [`Buf`] is neither `Clone` nor `Copy`: who has it is the only one on the CPU's side to reach its bytes. A
//!   buffer that a device may write is *moved into* the queue pair, and comes back by value with the completion.
//!
//! This is one of the few modules with `unsafe` in it; each block cites one of the rules above.
#![allow(unsafe_code)]

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{
    error::{Error, ErrorKind, Result},
    fork::Birth,
};

/// Bytes at a fixed address, zeroed when made, freed with the last reference.
pub struct Block {
    ptr: NonNull<u8>,
    layout: Layout,
    born: Birth,
}

// SAFETY: M1, a block is plain bytes without thread affinity; it gives no access to them by itself.
unsafe impl Send for Block {}
// SAFETY: as above: `&Block` only tells address and length.
unsafe impl Sync for Block {}

impl Block {
    /// `len` zero bytes whose first is aligned to `align`.
    ///
    /// # Errors
    /// `InvalidParam` if `len` is 0 or larger than the address space, or `align` is not a power of two; `NoMemory` if the
    /// system has not that much: a size may come from a user or a setting, which must not end the process.
    pub fn new(len: usize, align: usize) -> Result<Arc<Block>> {
        let layout = Layout::from_size_align(len, align)
            .ok()
            .filter(|l| l.size() > 0)
            .ok_or_else(|| Error::new(ErrorKind::InvalidParam, format!("memory of {len} bytes aligned to {align}")))?;
        // SAFETY: the layout's size is not zero (checked above).
        let ptr = unsafe { alloc_zeroed(layout) };
        match NonNull::new(ptr) {
            Some(ptr) => Ok(Arc::new(Block { ptr, layout, born: Birth::here() })),
            None => Err(Error::new(
                ErrorKind::NoMemory,
                format!("no memory for {len} bytes: ask for less, or raise the memory limits of this process"),
            )),
        }
    }

    /// The address of the first byte, for registration and work requests.
    pub fn addr(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// The number of bytes; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if !self.born.is_here() {
            // In a child, memory that the parent has registered may not even be there.
            return;
        }
        // SAFETY: M1: `ptr` came from `alloc_zeroed` with this layout, and this is the last reference.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:#x}, {} bytes)", self.addr(), self.len())
    }
}

/// The length of a page.
fn page_len() -> usize {
    static LEN: OnceLock<usize> = OnceLock::new();
    *LEN.get_or_init(|| {
        // SAFETY: no pointers.
        let len = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(len).ok().filter(|n| n.is_power_of_two()).unwrap_or(4096)
    })
}

/// How an [`Arena`] cuts its block.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ArenaLayout {
    /// How many buffers.
    pub count: usize,
    /// Bytes in each buffer.
    pub len: usize,
    /// Bytes in front of each buffer that the device never touches (see [`Buf::whole_mut`]).
    pub front: usize,
    /// `address + align_offset` of each buffer is a multiple of this power of two.
    pub align: usize,
    /// See `align`; 0 aligns the first byte (after the front), `n` aligns byte `n`.
    pub align_offset: usize,
}

/// A block cut into equal buffers, with the local key it was registered under.
///
/// The arena lives as long as any of its buffers. It shares no page with anything else.
pub struct Arena {
    block: Arc<Block>,
    lkey: AtomicU32,
    /// Bytes in each buffer, and before each.
    len: usize,
    front: usize,
    /// From one buffer to the next, and from the block's first byte to the first buffer.
    stride: usize,
    first: usize,
}

impl Arena {
    /// Makes the block and its buffers. The order of the buffers is by address.
    ///
    /// # Errors
    /// `InvalidParam` if the layout is empty, overflows, or its alignment is not a power of two.
    pub fn new(layout: ArenaLayout) -> Result<(Arc<Arena>, Vec<Buf>)> {
        let bad = || Error::new(ErrorKind::InvalidParam, format!("buffer arena of {layout:?}"));
        if layout.count == 0 || layout.len == 0 || !layout.align.is_power_of_two() {
            return Err(bad());
        }
        let shift = layout.align_offset.checked_add(layout.front).ok_or_else(bad)?;
        let pad = (layout.align - shift % layout.align) % layout.align;
        let whole = layout.len.checked_add(layout.front).ok_or_else(bad)?;
        let stride = whole.checked_next_multiple_of(layout.align).ok_or_else(bad)?;
        let total = stride.checked_mul(layout.count).and_then(|n| n.checked_add(pad)).ok_or_else(bad)?;
        // Whole pages of its own: to keep registered memory from being torn by a fork, libibverbs takes its pages away from
        // children, which must not miss what others keep in them.
        let page = page_len();
        let block = Block::new(total.checked_next_multiple_of(page).ok_or_else(bad)?, layout.align.max(page))?;
        let (len, front, first) = (layout.len, layout.front, pad + layout.front);
        let arena = Arc::new(Arena { block, lkey: AtomicU32::new(0), len, front, stride, first });
        let bufs = (0..layout.count)
            .map(|i| {
                // SAFETY: the end of the last buffer, `first + (count - 1) * stride + len`, is at most `total`, so the pointer
                // stays inside the block.
                let ptr = unsafe { arena.block.ptr.add(first + i * stride) };
                Buf { ptr, arena: arena.clone() }
            })
            .collect();
        Ok((arena, bufs))
    }

    /// The memory, for registration.
    pub fn block(&self) -> &Arc<Block> {
        &self.block
    }

    /// Remembers the local key of the registration that covers the whole block.
    pub fn set_lkey(&self, lkey: u32) {
        self.lkey.store(lkey, Ordering::Relaxed);
    }

    /// The local key, 0 before [`Arena::set_lkey`].
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.lkey.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({:?}, lkey {:#x})", self.block, self.lkey())
    }
}

/// The unique handle to one buffer of an [`Arena`]. Dereferences to its bytes.
///
/// What all buffers of an arena have in common is kept there: the handle is two words.
pub struct Buf {
    ptr: NonNull<u8>,
    arena: Arc<Arena>,
}

// Handed from hand to hand for every message.
const _: () = assert!(size_of::<Option<Buf>>() == 2 * size_of::<usize>());

// SAFETY: M2 and M3: the handle is unique and its bytes belong to nobody else.
unsafe impl Send for Buf {}
// SAFETY: `&Buf` gives only `&[u8]`.
unsafe impl Sync for Buf {}

impl Buf {
    /// False in a child that was forked since its memory was made.
    pub(crate) fn is_here(&self) -> bool {
        self.arena.block.born.is_here()
    }

    /// The buffer's place in its arena, from 0.
    pub fn index(&self) -> usize {
        (self.addr() - self.arena.block.addr() - self.arena.first) / self.arena.stride
    }

    /// The local key of the arena.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.arena.lkey()
    }

    /// The address of the first byte, for work requests.
    #[inline]
    pub fn addr(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// The bytes with the front: `whole_mut()[front_len()]` is the first byte of the buffer proper.
    pub fn whole_mut(&mut self) -> &mut [u8] {
        // SAFETY: M2: the `front` bytes before `ptr` were cut from the block for this buffer alone.
        let start = unsafe { self.ptr.as_ptr().sub(self.arena.front) };
        // SAFETY: as in `deref_mut`, over the front as well.
        unsafe { std::slice::from_raw_parts_mut(start, self.arena.front + self.arena.len) }
    }

    /// The number of bytes in front of the buffer proper.
    #[inline]
    pub fn front_len(&self) -> usize {
        self.arena.front
    }

    /// A buffer of its own, unregistered: for tests and for copies that outlive a pool.
    ///
    /// # Errors
    /// `InvalidParam` if `len` is 0.
    pub fn alloc(len: usize) -> Result<Buf> {
        let (_, mut bufs) = Arena::new(ArenaLayout { count: 1, len, front: 0, align: 64, align_offset: 0 })?;
        bufs.pop().ok_or_else(|| Error::new(ErrorKind::NoMemory, "empty arena"))
    }
}

impl Deref for Buf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: M1 to M3: `len` initialised bytes that live as long as `arena`, reached only through this handle.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.arena.len) }
    }
}

impl DerefMut for Buf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` excludes every other reference.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.arena.len) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf(#{}, {} bytes)", self.index(), self.len())
    }
}

/// What a registration must hold on to until it is dropped. Dropping it deregisters.
pub trait Registration: Send + Sync {
    /// The key for local access in work requests.
    fn lkey(&self) -> u32;

    /// Tells devices apart, for which keys are good: an address that nothing else has while the registration lives. 0 for
    /// memory of no device.
    fn device(&self) -> usize {
        0
    }
}

/// Memory registered with a device and owned by the caller, as `Vec<u8>` owns its bytes.
///
/// [`MemRegion::slice`] makes read-only views for zero-copy sends. While any view is alive (that is, while an operation
/// may still read the memory) [`MemRegion::bytes_mut`] answers `None`; the region itself may be dropped at any time, the
/// memory and its registration live until the last view is gone.
#[derive(Clone)]
pub struct MemSlice {
    region: Arc<RegionInner>,
    offset: usize,
    len: usize,
}

/// See [`MemSlice`] for the views that sends take.
pub struct MemRegion {
    inner: Arc<RegionInner>,
}

struct RegionInner {
    // Field order is drop order: deregister first, free after.
    registration: Box<dyn Registration>,
    buf: Buf,
}

impl MemRegion {
    /// Joins a buffer and its registration. Transports call this from `mem_alloc`.
    pub fn new(buf: Buf, registration: Box<dyn Registration>) -> Self {
        MemRegion { inner: Arc::new(RegionInner { registration, buf }) }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.inner.buf
    }

    /// The bytes for writing, or `None` while a view (an operation in flight) may read them.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        Arc::get_mut(&mut self.inner).map(|i| &mut *i.buf)
    }

    /// The number of bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.inner.buf.len()
    }

    /// A view of `range` for a zero-copy send.
    ///
    /// # Errors
    /// `InvalidParam` if the range is not inside the region.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Result<MemSlice> {
        if range.start > range.end || range.end > self.len() {
            return Err(Error::new(
                ErrorKind::InvalidParam,
                format!("range {range:?} of a memory region of {} bytes", self.len()),
            ));
        }
        Ok(MemSlice { region: self.inner.clone(), offset: range.start, len: range.len() })
    }
}

impl fmt::Debug for MemRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemRegion({} bytes, lkey {:#x})", self.len(), self.inner.registration.lkey())
    }
}

impl MemSlice {
    /// The local key for work requests.
    pub fn lkey(&self) -> u32 {
        self.region.registration.lkey()
    }

    /// [`Registration::device`] of the region, for transports: a key must not be used with another device.
    pub fn device(&self) -> usize {
        self.region.registration.device()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.region.buf[self.offset..self.offset + self.len]
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a view of nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for MemSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemSlice({}+{})", self.offset, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_aligns_the_byte_that_was_asked_for() {
        for (align, align_offset, front, len) in
            [(64, 0, 0, 100), (64, 48, 0, 4144), (4096, 48, 100, 4144), (1, 0, 7, 3), (8, 9, 3, 1)]
        {
            let (a, mut bufs) = Arena::new(ArenaLayout { count: 5, len, front, align, align_offset }).unwrap();
            let page = page_len();
            assert!(a.block().addr().is_multiple_of(page) && a.block().len().is_multiple_of(page), "pages of its own");
            assert_eq!(bufs.len(), 5);
            for w in bufs.windows(2) {
                assert!(w[0].addr() + len <= w[1].addr() - front);
            }
            for b in &mut bufs {
                assert_eq!((b.addr() + align_offset) % align, 0, "align {align} offset {align_offset}");
                assert!(b.iter().all(|&x| x == 0));
                assert_eq!(b.whole_mut().len(), front + len);
                b.whole_mut().fill(0);
            }
        }
    }

    #[test]
    fn empty_or_overflowing_arenas_are_refused() {
        let l = ArenaLayout { count: 1, len: 1, front: 0, align: 1, align_offset: 0 };
        for bad in [
            ArenaLayout { count: 0, ..l },
            ArenaLayout { len: 0, ..l },
            ArenaLayout { align: 3, ..l },
            ArenaLayout { len: usize::MAX, count: 2, ..l },
        ] {
            assert!(Arena::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn more_than_there_is_is_an_error() {
        let e = Block::new(1 << 62, 64).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::NoMemory);
        assert!(e.to_string().contains("4611686018427387904 bytes"), "{e}");
    }

    struct NoReg;
    impl Registration for NoReg {
        fn lkey(&self) -> u32 {
            7
        }
    }

    #[test]
    fn a_region_in_flight_cannot_be_written() {
        let mut r = MemRegion::new(Buf::alloc(16).unwrap(), Box::new(NoReg));
        r.bytes_mut().unwrap()[3] = 9;
        let s = r.slice(2..5).unwrap();
        assert_eq!(s.bytes(), [0, 9, 0]);
        assert!(r.bytes_mut().is_none());
        drop(s);
        assert!(r.bytes_mut().is_some());
        assert!(r.slice(5..17).is_err());
        let s = r.slice(0..16).unwrap();
        drop(r);
        assert_eq!(s.bytes()[3], 9);
    }
}
