//! Sends on their way to the device: work requests are staged and leave together, in one doorbell.
//!
//! What is posted inline is copied here, so the caller's bytes are free when `post_send` returns. What is not is only named
//! here; the caller keeps it, and the address handle, until a completion says that they are no longer read (the contract
//! of [`UdQp::post_send`](crate::device::UdQp::post_send)). Nothing of the provider is held between two calls: some of them
//! lock the send queue from `ibv_wr_start` to `ibv_wr_complete`.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use rdma_sys::{ibv_qp_ex, ibv_send_flags as Flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, ud_t};

use super::{
    device::RdmaAh,
    ffi::{Zero, check},
    handles::{Qp, QpEx},
};
use crate::device::{SendWr, VerbsError, VerbsResult};

/// Sends that leave together at most.
pub(super) const SLOTS: usize = 32;

/// See the module.
pub(super) struct SendStage {
    wrs: Box<[ibv_send_wr]>,
    /// `sge_max` for each slot.
    sges: Box<[ibv_sge]>,
    /// `inline_max` bytes for each slot.
    inline: Box<[u8]>,
    sge_max: usize,
    inline_max: usize,
    staged: usize,
    /// A staged send has more than one element.
    has_list: bool,
    /// Post such sends by `ibv_post_send` only.
    lists_plain: bool,
}

// SAFETY: the pointers in it lead into its own boxes, and to address handles, which may be used from any thread.
unsafe impl Send for SendStage {}

const EINVAL: VerbsError = VerbsError::new("post_send", libc::EINVAL);

impl SendStage {
    /// `lists_plain` is for providers that miscount the bytes of a list in `ibv_wr_set_sge_list`.
    pub(super) fn new(sge_max: u32, inline_max: u32, lists_plain: bool) -> Self {
        let (sge_max, inline_max) = (sge_max.max(1) as usize, inline_max as usize);
        SendStage {
            wrs: (0..SLOTS).map(|_| ibv_send_wr::zero()).collect(),
            sges: vec![ibv_sge { addr: 0, length: 0, lkey: 0 }; SLOTS * sge_max].into(),
            inline: vec![0; SLOTS * inline_max].into(),
            sge_max,
            inline_max,
            staged: 0,
            has_list: false,
            lists_plain,
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.staged == 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.staged == SLOTS
    }

    /// Forgets what has not left.
    pub(super) fn clear(&mut self) {
        self.staged = 0;
        self.has_list = false;
    }

    /// Stages a send; there must be room.
    ///
    /// # Errors
    /// `EINVAL` for too many elements or inline bytes; nothing was staged.
    #[inline]
    pub(super) fn push(&mut self, wr: &SendWr<'_, RdmaAh>) -> VerbsResult<()> {
        let slot = self.staged;
        let Some(out) = self.wrs.get_mut(slot) else { return Err(VerbsError::new("post_send", libc::ENOMEM)) };
        let sges = &mut self.sges[slot * self.sge_max..][..self.sge_max];
        let flags = flags(wr);
        let mut count = 0;
        if wr.inline {
            let area = &mut self.inline[slot * self.inline_max..][..self.inline_max];
            let mut len = 0;
            for sge in wr.sges {
                let end = len + sge.bytes.len();
                area.get_mut(len..end).ok_or(EINVAL)?.copy_from_slice(sge.bytes);
                len = end;
            }
            sges[0] = ibv_sge { addr: area.as_ptr().expose_provenance() as u64, length: len as u32, lkey: 0 };
            count = 1;
        } else {
            for sge in wr.sges.iter().filter(|s| !s.bytes.is_empty()) {
                let length = u32::try_from(sge.bytes.len()).map_err(|_| EINVAL)?;
                let addr = sge.bytes.as_ptr().expose_provenance() as u64;
                *sges.get_mut(count).ok_or(EINVAL)? = ibv_sge { addr, length, lkey: sge.lkey };
                count += 1;
            }
        }
        out.wr_id = wr.serial;
        out.opcode = ibv_wr_opcode::IBV_WR_SEND;
        out.send_flags = flags;
        out.num_sge = count as i32;
        out.wr.ud = ud_t { ah: wr.ah.0.ptr().as_ptr(), remote_qpn: wr.remote_qpn.get(), remote_qkey: wr.remote_qkey.0 };
        self.has_list |= count > 1;
        self.staged += 1;
        Ok(())
    }

    /// Lets everything leave by `qp`. What could not leave is gone: the queue pair needs a reset.
    ///
    /// # Errors
    /// What the provider answered.
    #[inline]
    pub(super) fn flush(&mut self, qp: &Qp) -> VerbsResult<()> {
        let n = std::mem::take(&mut self.staged);
        let plain = std::mem::take(&mut self.has_list) && self.lists_plain;
        match (n, qp.ex()) {
            (0, _) => Ok(()),
            (n, Some(ex)) if !plain => self.flush_ex(ex.ptr, n),
            (n, _) => self.flush_plain(qp, n),
        }
    }

    fn flush_ex(&mut self, ex: NonNull<ibv_qp_ex>, n: usize) -> VerbsResult<()> {
        let ex = ex.as_ptr();
        // SAFETY: the extended form of a live queue pair (here and below), used by this thread alone: `&mut self` belongs
        // to the queue pair's owner.
        unsafe { rdma_sys::ibv_wr_start(ex) };
        for (wr, sges) in self.wrs[..n].iter().zip(self.sges.chunks_exact_mut(self.sge_max)) {
            // SAFETY: as above.
            unsafe { (*ex).wr_id = wr.wr_id };
            // SAFETY: as above.
            unsafe { (*ex).wr_flags = wr.send_flags };
            // SAFETY: between start and complete.
            unsafe { rdma_sys::ibv_wr_send(ex) };
            // SAFETY: `push` wrote this field.
            let ud = unsafe { wr.wr.ud };
            // SAFETY: a live address handle of this domain: the caller keeps it until its sends have completed.
            unsafe { rdma_sys::ibv_wr_set_ud_addr(ex, ud.ah, ud.remote_qpn, ud.remote_qkey) };
            if wr.send_flags & Flags::IBV_SEND_INLINE.0 != 0 {
                let (addr, len) = (sges[0].addr as usize, sges[0].length as usize);
                // SAFETY: `len` bytes of `inline`, which are copied before the call returns.
                unsafe { rdma_sys::ibv_wr_set_inline_data(ex, ptr::with_exposed_provenance_mut(addr), len) };
            } else if let (1, sge) = (wr.num_sge, &sges[0]) {
                // SAFETY: the memory it names is registered, or the device refuses it.
                unsafe { rdma_sys::ibv_wr_set_sge(ex, sge.lkey, sge.addr, sge.length) };
            } else {
                // SAFETY: as many elements as `push` wrote, and as above.
                unsafe { rdma_sys::ibv_wr_set_sge_list(ex, wr.num_sge as usize, sges.as_ptr()) };
            }
        }
        // SAFETY: after start.
        check("post_send", unsafe { rdma_sys::ibv_wr_complete(ex) })
    }

    fn flush_plain(&mut self, qp: &Qp, n: usize) -> VerbsResult<()> {
        let sges = self.sges.as_mut_ptr();
        // Links are made of exposed addresses, for each is written through another path than it is followed by.
        let wrs = self.wrs.as_mut_ptr().expose_provenance();
        for (i, wr) in self.wrs[..n].iter_mut().enumerate() {
            let next = wrs + (i + 1) * size_of::<ibv_send_wr>();
            wr.next = if i + 1 < n { ptr::with_exposed_provenance_mut(next) } else { ptr::null_mut() };
            wr.sg_list = sges.wrapping_add(i * self.sge_max);
        }
        let mut bad = ptr::null_mut();
        // SAFETY: a live queue pair and a chain of `n` work requests; what they name is as in `flush_ex`.
        let rc = unsafe { rdma_sys::ibv_post_send(qp.ptr().as_ptr(), self.wrs.as_mut_ptr(), &raw mut bad) };
        check("post_send", rc)
    }
}

#[inline]
fn flags(wr: &SendWr<'_, RdmaAh>) -> u32 {
    let flag = |on: bool, flag: Flags| if on { flag.0 } else { 0 };
    flag(wr.inline, Flags::IBV_SEND_INLINE)
        | flag(wr.signaled, Flags::IBV_SEND_SIGNALED)
        | flag(wr.solicited, Flags::IBV_SEND_SOLICITED)
}

/// Posts a send of one element, and rings, without staging it. What an inline one names is copied by the provider.
#[inline(always)]
pub(super) fn post_one(qp: &QpEx, wr: &SendWr<'_, RdmaAh>) -> VerbsResult<()> {
    let Some(sge) = wr.sges.first() else { return Err(EINVAL) };
    let addr = sge.bytes.as_ptr().expose_provenance();
    let ex = qp.ptr.as_ptr();
    // SAFETY: as in `SendStage::flush_ex`, here and below; the functions are those of this queue pair.
    unsafe { (qp.start)(ex) };
    // SAFETY: as above.
    unsafe { (*ex).wr_id = wr.serial };
    // SAFETY: as above.
    unsafe { (*ex).wr_flags = flags(wr) };
    // SAFETY: as above.
    unsafe { (qp.send)(ex) };
    // SAFETY: as above.
    unsafe { (qp.set_ud_addr)(ex, wr.ah.0.ptr().as_ptr(), wr.remote_qpn.get(), wr.remote_qkey.0) };
    if wr.inline {
        // SAFETY: bytes that the caller lends, copied before the call returns.
        unsafe { (qp.set_inline_data)(ex, ptr::with_exposed_provenance_mut(addr), sge.bytes.len()) };
    } else {
        // SAFETY: as above.
        unsafe { (qp.set_sge)(ex, sge.lkey, addr as u64, sge.bytes.len() as u32) };
    }
    // SAFETY: after start.
    check("post_send", unsafe { (qp.complete)(ex) })
}
