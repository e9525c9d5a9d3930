//! Interfaces: one transport on one device port, with its own queues, handlers and endpoints.
//!
//! [`Iface`] is the handle; it dereferences to [`Interface`], the object-safe trait that transports implement. Look at
//! [`IfaceAttr`] before choosing a form of send: an absent limit (`None`) means that the form is not supported.

use std::{fmt, num::NonZeroUsize, ops::Deref, os::fd::RawFd, sync::Arc, time::Duration};

use crate::{
    am::{AmHandler, AmId, HandlerKind},
    completion::Completion,
    ep::{Endpoint, Ep, EpParams, ErrorHandler, FlushMode, Posted},
    error::{Result, SendResult},
    fork::{Birth, gone_interface},
    time::Time,
};

bitflags::bitflags! {
    /// What an interface can do beyond the sized operations in [`AmLimits`].
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
    pub struct Caps: u64 {
        /// Pending requests.
        const PENDING = 1 << 0;
        /// Endpoints connect to an interface address.
        const CONNECT_TO_IFACE = 1 << 1;
        /// Endpoints connect to an endpoint address.
        const CONNECT_TO_EP = 1 << 2;
        /// [`Endpoint::check`].
        const EP_CHECK = 1 << 3;
        /// Handlers that run in `progress`.
        const HANDLER_SYNC = 1 << 4;
        /// Handlers that run on the progress thread.
        const HANDLER_ASYNC = 1 << 5;
        /// Dead peers are detected and reported.
        const PEER_FAILURE = 1 << 6;
        /// Reaches other hosts.
        const INTER_NODE = 1 << 7;
        /// [`Interface::arm`] and [`Interface::event_fd`].
        const EVENT_FD = 1 << 8;
    }
}

bitflags::bitflags! {
    /// What to be woken for.
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
    pub struct Events: u32 {
        /// An operation has completed.
        const SEND_COMP = 1;
        /// A message has arrived.
        const RECV = 2;
    }
}

/// The answer of [`Interface::arm`].
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
#[must_use]
pub enum Arm {
    /// The event fd becomes readable at the next event.
    Armed,
    /// There is work already: call `progress`, then arm again.
    Busy,
}

/// Limits of active messages, in bytes. They count header and payload together.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct AmLimits {
    /// For `am_short` (its 8-byte header included) and `am_short_iov`.
    pub max_short: Option<NonZeroUsize>,
    /// For `am_bcopy`.
    pub max_bcopy: Option<NonZeroUsize>,
    /// For `am_zcopy`.
    pub max_zcopy: Option<NonZeroUsize>,
    /// Header bytes of `am_zcopy`.
    pub max_hdr: usize,
    /// Pieces of `am_zcopy`.
    pub max_iov: usize,
    /// Alignment of zero-copy buffers that is best for the device.
    pub opt_zcopy_align: usize,
    /// The unit in which the device cuts messages.
    pub align_mtu: usize,
}

/// What an interface tells about itself.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct IfaceAttr {
    /// Transport name, for example `ud_verbs`.
    pub transport: &'static str,
    /// Device and port, for example `soft0:1`.
    pub device: String,
    /// See [`Caps`].
    pub caps: Caps,
    /// See [`AmLimits`].
    pub am: AmLimits,
    /// Length of [`Interface::device_address`].
    pub device_addr_len: usize,
    /// Length of [`Interface::iface_address`].
    pub iface_addr_len: usize,
    /// Length of [`Endpoint::address`], 0 without `CONNECT_TO_EP`.
    pub ep_addr_len: usize,
    /// Time of flight of a small message, estimated.
    pub latency: Duration,
    /// Bandwidth of the port, shared by all its users, in bytes per second, estimated.
    pub bandwidth_bps: f64,
    /// CPU time per message on either side, estimated.
    pub overhead: Duration,
    /// Network paths to choose from with [`EpParams::path_index`].
    pub num_paths: u8,
    /// Endpoints a library should open at most; `usize::MAX` for no advice.
    pub max_num_eps: usize,
}

impl IfaceAttr {
    /// An attribute set with nothing in it, for transports to fill.
    pub fn empty(transport: &'static str, device: String) -> Self {
        IfaceAttr {
            transport,
            device,
            caps: Caps::empty(),
            am: AmLimits::default(),
            device_addr_len: 0,
            iface_addr_len: 0,
            ep_addr_len: 0,
            latency: Duration::ZERO,
            bandwidth_bps: 0.0,
            overhead: Duration::ZERO,
            num_paths: 1,
            max_num_eps: usize::MAX,
        }
    }
}

/// What the user wants of an interface.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct IfaceParams {
    /// Bytes the user wants free in front of each received message.
    pub rx_headroom: usize,
    /// `payload address + am_align_offset` is a multiple of this; a power of two, 0 for the transport's own choice.
    pub am_alignment: usize,
    /// See `am_alignment`; less than it.
    pub am_align_offset: usize,
    /// Called for failed endpoints. Without one, failures are logged as warnings and calls on the endpoint tell.
    pub error_handler: Option<ErrorHandler>,
}

impl IfaceParams {
    /// Sets the error handler.
    pub fn on_error(mut self, handler: ErrorHandler) -> Self {
        self.error_handler = Some(handler);
        self
    }

    /// Asks for `bytes` of headroom.
    pub fn rx_headroom(mut self, bytes: usize) -> Self {
        self.rx_headroom = bytes;
        self
    }

    /// Asks for payload alignment, see the fields.
    pub fn alignment(mut self, align: usize, offset: usize) -> Self {
        self.am_alignment = align;
        self.am_align_offset = offset;
        self
    }
}

impl fmt::Debug for IfaceParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IfaceParams")
            .field("rx_headroom", &self.rx_headroom)
            .field("am_alignment", &self.am_alignment)
            .field("am_align_offset", &self.am_align_offset)
            .field("error_handler", &self.error_handler.is_some())
            .finish()
    }
}

/// A named counter.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Counter {
    /// Dotted name, for example `rx.drop.no_such_ep`.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
}

/// The operations of an interface.
pub trait Interface: Send + Sync {
    /// Limits and estimates. Fixed for the life of the interface.
    fn attr(&self) -> &IfaceAttr;

    /// The address of the device port, of fixed length.
    fn device_address(&self) -> Vec<u8>;

    /// The address of this interface on its device, of fixed length.
    fn iface_address(&self) -> Vec<u8>;

    /// Whether messages could get from here to a device with this address; if not, why not, in words. A local question,
    /// safe for any bytes.
    fn is_reachable(&self, device_addr: &[u8]) -> Result<(), String>;

    /// Makes an endpoint. That it succeeds says nothing about the peer being alive: failures arrive at the error handler.
    fn create_ep(self: Arc<Self>, params: &EpParams) -> Result<Arc<dyn Endpoint>>;

    /// Installs the handler of an id, replacing the one before. Messages for ids without a handler are counted and
    /// dropped, with one warning per id.
    fn set_am_handler(&self, id: AmId, handler: Option<AmHandler>, kind: HandlerKind) -> Result<()>;

    /// Completes when everything accepted before, on all endpoints, is dealt with.
    fn flush(&self, mode: FlushMode, comp: Option<&Completion>) -> SendResult<Posted>;

    /// Operations after the fence, on any endpoint, do not overtake those before it.
    fn fence(&self) -> SendResult<()>;

    /// Starts (`true`) or stops taking part in the worker's `progress`. Off at open: enable it after installing handlers.
    fn progress_enable(&self, on: bool);

    /// Does a bounded amount of work and calls what is due; returns the number of events. The worker calls it.
    fn progress(&self) -> usize;

    /// As `progress`, from the progress thread: gives way if the user's thread is inside, calls only async handlers.
    fn progress_async(&self) -> usize;

    /// False if the progress thread is to leave the interface to the user altogether: its timers and events are not the
    /// thread's business then.
    fn is_async(&self) -> bool {
        true
    }

    /// Lets sends leave that were held back to travel together. The progress thread calls it; it gives way if the user's
    /// thread is inside.
    fn ring(&self);

    /// When `progress` has timer work next. `None` means never: an idle interface needs no timer.
    fn next_timeout(&self) -> Option<Time>;

    /// Makes the event fd fire once at the next event.
    ///
    /// # Errors
    /// `Unsupported` without [`Caps::EVENT_FD`].
    fn arm(&self, events: Events) -> Result<Arm>;

    /// An fd for `poll` and `epoll`; never read or written by the user.
    fn event_fd(&self) -> Option<RawFd>;

    /// [`Interface::arm`] for the progress thread: arms for everything and gives an fd for this thread alone, so that the
    /// thread and a user who sleeps do not take each other's wake-ups. Work that only the user's thread may do does not
    /// count as `Busy`. `None` if there are no events: then the thread looks at every tick.
    fn arm_async(&self) -> Option<(RawFd, Arm)> {
        None
    }

    /// Counters, by name, in a fixed order.
    fn counters(&self) -> Vec<Counter>;

    /// What [`Iface`]'s drop calls. Idempotent.
    fn close_iface(&self);
}

/// The handle of an interface. Dropping it closes the interface: endpoints that are left fail with `Closed`, every
/// outstanding completion is settled with `Canceled`, and peers that understand it are told. It never blocks; flush first
/// if delivery matters.
///
/// In a child that was forked since it was opened, calls fail and dropping does nothing, see [`fork`](crate::fork).
pub struct Iface {
    inner: Arc<dyn Interface>,
    born: Birth,
}

impl Iface {
    /// For transports.
    pub fn from_transport(inner: Arc<dyn Interface>) -> Self {
        Iface { inner, born: Birth::here() }
    }

    /// Makes an endpoint. See [`Interface::create_ep`].
    pub fn ep(&self, params: &EpParams) -> Result<Ep> {
        self.born.check()?;
        Ok(Ep::from_transport(self.inner.clone().create_ep(params)?))
    }

    /// Installs a handler that runs in `progress`. See [`Interface::set_am_handler`].
    pub fn on_am(&self, id: AmId, f: impl Fn(crate::am::AmMessage<'_>) + Send + Sync + 'static) -> Result<()> {
        self.set_am_handler(id, Some(Arc::new(f)), HandlerKind::Sync)
    }

    /// Installs a handler that may also run on the progress thread.
    pub fn on_am_async(&self, id: AmId, f: impl Fn(crate::am::AmMessage<'_>) + Send + Sync + 'static) -> Result<()> {
        self.set_am_handler(id, Some(Arc::new(f)), HandlerKind::Async)
    }

    /// The transport's object, to share with callbacks. It does not keep the interface open. It knows nothing of forks: not
    /// to be used in a child.
    pub fn transport(&self) -> &Arc<dyn Interface> {
        &self.inner
    }

    /// Closes the interface: the same as dropping it.
    pub fn close(self) {}
}

impl Deref for Iface {
    type Target = dyn Interface;
    #[inline]
    fn deref(&self) -> &Self::Target {
        if self.born.is_here() { &*self.inner } else { gone_interface() }
    }
}

impl Drop for Iface {
    fn drop(&mut self) {
        if self.born.is_here() {
            self.inner.close_iface();
        } else {
            // The parent's: what it refers to must not end here.
            std::mem::forget(self.inner.clone());
        }
    }
}

impl fmt::Debug for Iface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let a = self.attr();
        write!(f, "Iface({}/{})", a.transport, a.device)
    }
}
