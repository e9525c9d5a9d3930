//! Owners of verbs objects. Each holds what it was made from, so that objects die children first whatever is dropped when.
//!
//! - **H1** The pointer in an owner is what the library returned for it, and is passed to the destroy call exactly once.
//! - **H2** An owner holds its parents by `Arc`, so they are alive while it is. libibverbs allows calls on one object from
//!   several threads, but not together with its destruction, which `Drop` excludes.
#![allow(unsafe_code)]

use std::{ffi::c_void, os::fd::RawFd, ptr::NonNull, sync::Arc};

use rdma_sys::{
    ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid,
    ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as Mask, ibv_qp_create_send_ops_flags as SendOps, ibv_qp_ex,
    ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_qp_init_attr_mask as InitMask, ibv_qp_state, ibv_qp_type,
};
use uct::{fork::Birth, mem::Block};

use super::ffi::{self, Zero, check, last_errno, object};
use crate::{
    device::{QpInit, VerbsError, VerbsResult},
    types::Gid,
};

/// What a destroy call said, for the log. After a fatal event all of them fail.
fn destroyed(what: &str, rc: i32) {
    if let Err(e) = check("destroy", rc) {
        tracing::debug!("destroying a {what}: {e}");
    }
}

fn nonblocking(fd: RawFd) -> VerbsResult<()> {
    // SAFETY: no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 {
        return Err(VerbsError::new("fcntl", last_errno()));
    }
    // SAFETY: no pointers.
    let rc = unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) };
    if rc < 0 { Err(VerbsError::new("fcntl", last_errno())) } else { Ok(()) }
}

/// An open device. All that is made from it leads back here, also to ask whether it is this process's to destroy: after a
/// fork a child's destroy calls would reach the parent's objects, so its drops do nothing.
pub(super) struct Context {
    ptr: NonNull<ibv_context>,
    born: Birth,
}

// SAFETY: H2.
unsafe impl Send for Context {}
// SAFETY: H2.
unsafe impl Sync for Context {}

impl Context {
    /// # Safety
    /// `device` is in a device list that has not been freed.
    pub(super) unsafe fn open(device: NonNull<ibv_device>) -> VerbsResult<Context> {
        // SAFETY: the caller's promise.
        let ctx = object("open_device", unsafe { rdma_sys::ibv_open_device(device.as_ptr()) })?;
        let ctx = Context { ptr: ctx, born: Birth::here() };
        // Events are looked for, never waited for.
        nonblocking(ctx.async_fd())?;
        Ok(ctx)
    }

    pub(super) fn ptr(&self) -> NonNull<ibv_context> {
        self.ptr
    }

    /// False in a process that was forked since it was opened.
    pub(super) fn is_here(&self) -> bool {
        self.born.is_here()
    }

    fn async_fd(&self) -> RawFd {
        // SAFETY: H1; the field does not change.
        unsafe { (*self.ptr.as_ptr()).async_fd }
    }

    pub(super) fn query_device(&self) -> VerbsResult<ibv_device_attr> {
        let mut attr = ibv_device_attr::zero();
        // SAFETY: H1, and a structure to fill.
        let rc = unsafe { rdma_sys::ibv_query_device(self.ptr.as_ptr(), &raw mut attr) };
        check("query_device", rc)?;
        Ok(attr)
    }

    pub(super) fn query_gid(&self, port: u8, index: i32) -> VerbsResult<Gid> {
        let mut gid = ibv_gid::zero();
        // SAFETY: H1, and a structure to fill.
        let rc = unsafe { rdma_sys::ibv_query_gid(self.ptr.as_ptr(), port, index, &raw mut gid) };
        check("query_gid", rc)?;
        Ok(Gid(ffi::gid_bytes(&gid)))
    }

    /// In host order.
    pub(super) fn query_pkey(&self, port: u8, index: i32) -> VerbsResult<u16> {
        let mut pkey = 0u16;
        // SAFETY: H1, and a number to fill.
        let rc = unsafe { rdma_sys::ibv_query_pkey(self.ptr.as_ptr(), port, index, &raw mut pkey) };
        check("query_pkey", rc)?;
        Ok(u16::from_be(pkey))
    }

    /// The next event, if there is one: its raw number, and the port or queue pair it is about. `EIO` once the device is
    /// gone. The event is acknowledged, without which destroying its queue pair would wait for ever.
    pub(super) fn async_event(&self) -> VerbsResult<Option<RawEvent>> {
        let mut event = std::mem::MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: H1, and a structure to fill.
        let rc = unsafe { rdma_sys::ibv_get_async_event(self.ptr.as_ptr(), event.as_mut_ptr()) };
        if rc != 0 {
            let errno = last_errno();
            let none = errno == libc::EAGAIN || errno == libc::EINTR;
            return if none { Ok(None) } else { Err(VerbsError::new("get_async_event", errno)) };
        }
        // As a number: the bindings' type is an enum, in which an event of a newer library would be no value at all.
        // SAFETY: inside the structure.
        let kind = unsafe { &raw const (*event.as_ptr()).event_type };
        // SAFETY: four bytes that the call has filled.
        let kind = unsafe { kind.cast::<u32>().read() };
        let element = event.as_ptr().cast::<*mut c_void>();
        // SAFETY: the union at the front, whose bytes were all zero before the call; as wide as a pointer.
        let element = unsafe { element.read() };
        let qpn = RawEvent::is_of_qp(kind).then(|| {
            // SAFETY: until it is acknowledged, its queue pair is not destroyed.
            unsafe { (*element.cast::<ibv_qp>()).qp_num }
        });
        // The port number is an `int` at the same place; a little-endian pointer holds it in its low half.
        let port = element.addr().to_ne_bytes()[0];
        // SAFETY: the event that was got, acknowledged once.
        unsafe { rdma_sys::ibv_ack_async_event(event.as_mut_ptr()) };
        Ok(Some(RawEvent { kind, port, qpn }))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.is_here() {
            return;
        }
        // SAFETY: H1, and everything made from it is gone (H2).
        destroyed("context", unsafe { rdma_sys::ibv_close_device(self.ptr.as_ptr()) });
    }
}

/// An async event as the library tells it.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct RawEvent {
    /// `ibv_event_type`.
    pub(super) kind: u32,
    /// For events of a port.
    pub(super) port: u8,
    /// For events of a queue pair.
    pub(super) qpn: Option<u32>,
}

impl RawEvent {
    /// The events whose element is a queue pair.
    fn is_of_qp(kind: u32) -> bool {
        use rdma_sys::ibv_event_type as T;
        [
            T::IBV_EVENT_QP_FATAL,
            T::IBV_EVENT_QP_REQ_ERR,
            T::IBV_EVENT_QP_ACCESS_ERR,
            T::IBV_EVENT_COMM_EST,
            T::IBV_EVENT_SQ_DRAINED,
            T::IBV_EVENT_PATH_MIG,
            T::IBV_EVENT_PATH_MIG_ERR,
            T::IBV_EVENT_QP_LAST_WQE_REACHED,
        ]
        .iter()
        .any(|t| *t as u32 == kind)
    }
}

/// A protection domain.
pub(super) struct Pd {
    ptr: NonNull<ibv_pd>,
    ctx: Arc<Context>,
}

// SAFETY: H2.
unsafe impl Send for Pd {}
// SAFETY: H2.
unsafe impl Sync for Pd {}

impl Pd {
    pub(super) fn alloc(ctx: Arc<Context>) -> VerbsResult<Pd> {
        // SAFETY: an open context.
        let ptr = object("alloc_pd", unsafe { rdma_sys::ibv_alloc_pd(ctx.ptr().as_ptr()) })?;
        Ok(Pd { ptr, ctx })
    }

    pub(super) fn ctx(&self) -> &Arc<Context> {
        &self.ctx
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        if !self.ctx.is_here() {
            return;
        }
        // SAFETY: H1.
        destroyed("protection domain", unsafe { rdma_sys::ibv_dealloc_pd(self.ptr.as_ptr()) });
    }
}

/// A registration. Dropping it without [`Mr::dereg`] leaks it and the memory it covers, which is safe.
pub(super) struct Mr {
    ptr: NonNull<ibv_mr>,
    block: std::mem::ManuallyDrop<Arc<Block>>,
    _pd: Arc<Pd>,
}

// SAFETY: H2.
unsafe impl Send for Mr {}

impl Mr {
    pub(super) fn reg(pd: &Arc<Pd>, block: &Arc<Block>, access: i32) -> VerbsResult<Mr> {
        let addr = std::ptr::with_exposed_provenance_mut::<c_void>(block.addr());
        // SAFETY: the block's bytes stay where they are while it is held, which is until after deregistration.
        let mr = unsafe { rdma_sys::ibv_reg_mr(pd.ptr.as_ptr(), addr, block.len(), access) };
        let ptr = object("reg_mr", mr)?;
        Ok(Mr { ptr, block: std::mem::ManuallyDrop::new(block.clone()), _pd: pd.clone() })
    }

    /// The local and the remote key.
    pub(super) fn keys(&self) -> (u32, u32) {
        // SAFETY: H1.
        let lkey = unsafe { (*self.ptr.as_ptr()).lkey };
        // SAFETY: H1.
        let rkey = unsafe { (*self.ptr.as_ptr()).rkey };
        (lkey, rkey)
    }

    /// Deregisters, and gives the memory back unless the device may still reach it.
    pub(super) fn dereg(self) -> VerbsResult<()> {
        // SAFETY: H1; `self` is consumed.
        let rc = unsafe { rdma_sys::ibv_dereg_mr(self.ptr.as_ptr()) };
        let done = check("dereg_mr", rc);
        if done.as_ref().is_err_and(|e| !is_gone(e.errno)) {
            // Refused by a working device: the memory stays allocated for as long as the process lives.
            return done;
        }
        drop(std::mem::ManuallyDrop::into_inner(self.block));
        done
    }
}

/// An address handle. Dropping it without [`Ah::destroy`] leaks it.
pub(super) struct Ah {
    ptr: NonNull<ibv_ah>,
    pd: Arc<Pd>,
}

// SAFETY: H2; nothing but its address is used.
unsafe impl Send for Ah {}
// SAFETY: as above.
unsafe impl Sync for Ah {}

impl Ah {
    /// May sleep.
    pub(super) fn create(pd: &Arc<Pd>, mut attr: ibv_ah_attr) -> VerbsResult<Ah> {
        // SAFETY: a live domain and an initialised structure.
        let ah = unsafe { rdma_sys::ibv_create_ah(pd.ptr.as_ptr(), &raw mut attr) };
        object("create_ah", ah).map(|ptr| Ah { ptr, pd: pd.clone() })
    }

    pub(super) fn ptr(&self) -> NonNull<ibv_ah> {
        self.ptr
    }

    /// True if it was made in this domain: only then does the provider know it.
    #[inline]
    pub(super) fn is_of(&self, pd: &Arc<Pd>) -> bool {
        Arc::ptr_eq(&self.pd, pd)
    }

    /// May sleep.
    pub(super) fn destroy(self) -> VerbsResult<()> {
        // SAFETY: H1; `self` is consumed.
        check("destroy_ah", unsafe { rdma_sys::ibv_destroy_ah(self.ptr.as_ptr()) })
    }
}

/// True for what calls answer after the device was removed: it reaches no memory any more.
pub(super) fn is_gone(errno: i32) -> bool {
    errno == libc::EIO || errno == libc::ENODEV
}

/// A completion channel: the fd that completions are announced on.
pub(super) struct Channel {
    ptr: NonNull<ibv_comp_channel>,
    ctx: Arc<Context>,
}

// SAFETY: H2.
unsafe impl Send for Channel {}
// SAFETY: H2.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn create(ctx: &Arc<Context>) -> VerbsResult<Channel> {
        // SAFETY: an open context.
        let ptr = object("create_comp_channel", unsafe { rdma_sys::ibv_create_comp_channel(ctx.ptr().as_ptr()) })?;
        let channel = Channel { ptr, ctx: ctx.clone() };
        nonblocking(channel.fd())?;
        Ok(channel)
    }

    pub(super) fn fd(&self) -> RawFd {
        // SAFETY: H1; the field does not change.
        unsafe { (*self.ptr.as_ptr()).fd }
    }

    /// Takes all events off the fd, and acknowledges them: destroying a queue waits for that.
    pub(super) fn drain(&self) {
        let mut cq: *mut ibv_cq = std::ptr::null_mut();
        let mut arg: *mut c_void = std::ptr::null_mut();
        loop {
            // SAFETY: H1, and two pointers to fill. The fd does not block.
            let rc = unsafe { rdma_sys::ibv_get_cq_event(self.ptr.as_ptr(), &raw mut cq, &raw mut arg) };
            if rc != 0 {
                return;
            }
            // SAFETY: the queue of an event that has not been acknowledged is alive.
            unsafe { rdma_sys::ibv_ack_cq_events(cq, 1) };
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.ctx.is_here() {
            return;
        }
        // SAFETY: H1; its queues are gone (H2).
        destroyed("completion channel", unsafe { rdma_sys::ibv_destroy_comp_channel(self.ptr.as_ptr()) });
    }
}

/// A completion queue.
pub(super) struct Cq {
    ptr: NonNull<ibv_cq>,
    channel: Arc<Channel>,
}

// SAFETY: H2.
unsafe impl Send for Cq {}

impl Cq {
    pub(super) fn create(channel: &Arc<Channel>, depth: u32) -> VerbsResult<Cq> {
        let depth = i32::try_from(depth.max(1)).unwrap_or(i32::MAX);
        let (ctx, chan) = (channel.ctx.ptr().as_ptr(), channel.ptr.as_ptr());
        // SAFETY: an open context and a channel of it.
        let cq = unsafe { rdma_sys::ibv_create_cq(ctx, depth, std::ptr::null_mut(), chan, 0) };
        Ok(Cq { ptr: object("create_cq", cq)?, channel: channel.clone() })
    }

    pub(super) fn ptr(&self) -> NonNull<ibv_cq> {
        self.ptr
    }

    /// Makes the next completion (of a solicited message, if so wanted) appear on the channel.
    pub(super) fn notify(&self, solicited: bool) -> VerbsResult<()> {
        // SAFETY: H1.
        check("req_notify_cq", unsafe { rdma_sys::ibv_req_notify_cq(self.ptr.as_ptr(), i32::from(solicited)) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        if !self.channel.ctx.is_here() {
            return;
        }
        // SAFETY: H1; its queue pair is gone (H2), and its events are acknowledged as soon as they are read.
        destroyed("completion queue", unsafe { rdma_sys::ibv_destroy_cq(self.ptr.as_ptr()) });
    }
}

/// What a queue pair got.
#[derive(Copy, Clone, Debug)]
pub(super) struct Granted {
    pub(super) inline_len: u32,
    pub(super) send_sge: u32,
}

/// A queue pair with its completion queues.
pub(super) struct Qp {
    ptr: NonNull<ibv_qp>,
    /// For posting by `ibv_wr_*`, where the provider has it.
    ex: Option<QpEx>,
    /// Destroyed already.
    done: bool,
    pub(super) send_cq: Cq,
    pub(super) recv_cq: Cq,
    pd: Arc<Pd>,
}

// SAFETY: H2.
unsafe impl Send for Qp {}

/// The extended form of a queue pair, with the functions by which the provider posts a send: it sets them when it makes the
/// queue pair, so that they can be looked up once.
pub(super) struct QpEx {
    pub(super) ptr: NonNull<ibv_qp_ex>,
    pub(super) start: unsafe extern "C" fn(*mut ibv_qp_ex),
    pub(super) send: unsafe extern "C" fn(*mut ibv_qp_ex),
    pub(super) set_ud_addr: unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32),
    pub(super) set_inline_data: unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, usize),
    pub(super) set_sge: unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32),
    pub(super) complete: unsafe extern "C" fn(*mut ibv_qp_ex) -> i32,
}

impl Qp {
    /// Makes a UD queue pair in the RESET state.
    pub(super) fn create(pd: &Arc<Pd>, send_cq: Cq, recv_cq: Cq, init: &QpInit) -> VerbsResult<(Qp, Granted)> {
        let mut ex = ibv_qp_init_attr_ex::zero();
        ex.send_cq = send_cq.ptr.as_ptr();
        ex.recv_cq = recv_cq.ptr.as_ptr();
        ex.qp_type = ibv_qp_type::IBV_QPT_UD;
        ex.cap.max_send_wr = init.send_depth;
        ex.cap.max_recv_wr = init.recv_depth;
        ex.cap.max_send_sge = init.send_sge;
        ex.cap.max_recv_sge = 1;
        ex.cap.max_inline_data = init.inline_len;
        ex.comp_mask = InitMask::IBV_QP_INIT_ATTR_PD.0 | InitMask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
        ex.pd = pd.ptr.as_ptr();
        ex.send_ops_flags = u64::from(SendOps::IBV_QP_EX_WITH_SEND.0);
        if let Ok(ptr) = ffi::create_qp_ex(pd.ctx.ptr(), &mut ex) {
            let mut qp = Qp { ptr, ex: None, done: false, send_cq, recv_cq, pd: pd.clone() };
            qp.ex = qp.find_ex();
            return Ok((qp, Granted { inline_len: ex.cap.max_inline_data, send_sge: ex.cap.max_send_sge }));
        }
        // Providers differ in what they answer to a request that they do not know, so this decides.
        let mut plain = ibv_qp_init_attr::zero();
        plain.send_cq = send_cq.ptr.as_ptr();
        plain.recv_cq = recv_cq.ptr.as_ptr();
        plain.qp_type = ibv_qp_type::IBV_QPT_UD;
        plain.cap = ex.cap;
        plain.cap.max_inline_data = init.inline_len;
        // SAFETY: a live domain, and an initialised structure with live queues.
        let qp = unsafe { rdma_sys::ibv_create_qp(pd.ptr.as_ptr(), &raw mut plain) };
        let ptr = object("create_qp", qp)?;
        let qp = Qp { ptr, ex: None, done: false, send_cq, recv_cq, pd: pd.clone() };
        Ok((qp, Granted { inline_len: plain.cap.max_inline_data, send_sge: plain.cap.max_send_sge }))
    }

    /// The extended form, if it has all functions that are used.
    fn find_ex(&self) -> Option<QpEx> {
        // SAFETY: H1, and made by `create_qp_ex`.
        let ex = NonNull::new(unsafe { rdma_sys::ibv_qp_to_qp_ex(self.ptr.as_ptr()) })?;
        // SAFETY: the structure around a queue pair that was made with send operations; nobody writes to it now.
        let fns = unsafe { ex.as_ref() };
        fns.wr_set_sge_list?;
        Some(QpEx {
            start: fns.wr_start?,
            send: fns.wr_send?,
            set_ud_addr: fns.wr_set_ud_addr?,
            set_inline_data: fns.wr_set_inline_data?,
            set_sge: fns.wr_set_sge?,
            complete: fns.wr_complete?,
            ptr: ex,
        })
    }

    pub(super) fn ptr(&self) -> NonNull<ibv_qp> {
        self.ptr
    }

    #[inline]
    pub(super) fn ex(&self) -> Option<&QpEx> {
        self.ex.as_ref()
    }

    pub(super) fn qpn(&self) -> u32 {
        // SAFETY: H1; the field does not change.
        unsafe { (*self.ptr.as_ptr()).qp_num }
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> VerbsResult<()> {
        // SAFETY: H1, and an initialised structure.
        check("modify_qp", unsafe { rdma_sys::ibv_modify_qp(self.ptr.as_ptr(), attr, mask as i32) })
    }

    /// Takes it from any state to ready, by RESET, where it forgets what is posted. May sleep.
    pub(super) fn set_up_again(&self, init: &QpInit) -> VerbsResult<()> {
        self.to_reset()?;
        self.to_ready(init)
    }

    fn to_reset(&self) -> VerbsResult<()> {
        let mut attr = ibv_qp_attr::zero();
        attr.qp_state = ibv_qp_state::IBV_QPS_RESET;
        self.modify(&mut attr, Mask::IBV_QP_STATE.0)
    }

    /// Takes it from RESET to ready.
    pub(super) fn to_ready(&self, init: &QpInit) -> VerbsResult<()> {
        let mut attr = ibv_qp_attr::zero();
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attr.pkey_index = init.pkey_index;
        attr.port_num = init.port;
        attr.qkey = init.qkey.0;
        let mask = Mask::IBV_QP_STATE.0 | Mask::IBV_QP_PKEY_INDEX.0 | Mask::IBV_QP_PORT.0 | Mask::IBV_QP_QKEY.0;
        self.modify(&mut attr, mask)?;
        let mut attr = ibv_qp_attr::zero();
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        self.modify(&mut attr, Mask::IBV_QP_STATE.0)?;
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        attr.sq_psn = 0;
        self.modify(&mut attr, Mask::IBV_QP_STATE.0 | Mask::IBV_QP_SQ_PSN.0)
    }

    /// Destroys it, before its owner is dropped.
    pub(super) fn destroy(&mut self) -> VerbsResult<()> {
        if std::mem::replace(&mut self.done, true) || !self.pd.ctx.is_here() {
            return Ok(());
        }
        // SAFETY: H1: the flag was not set.
        check("destroy_qp", unsafe { rdma_sys::ibv_destroy_qp(self.ptr.as_ptr()) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        if let Err(e) = self.destroy() {
            tracing::debug!("destroying a queue pair: {e}");
        }
    }
}
