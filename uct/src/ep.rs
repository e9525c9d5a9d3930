//! Endpoints: one peer, as seen from one interface.
//!
//! [`Ep`] is the handle: dropping it destroys the endpoint. It dereferences to [`Endpoint`], the object-safe trait that
//! transports implement and that callbacks get.
//!
//! What an operation does with the caller's memory decides which form to use:
//!
//! | form | memory | returns |
//! |---|---|---|
//! | [`am_short`](Endpoint::am_short), [`am_short_iov`](Endpoint::am_short_iov) | copied before return | `()` |
//! | [`am_bcopy`](Endpoint::am_bcopy) | written by a closure straight into the send buffer | bytes packed |
//! | [`am_zcopy`](Endpoint::am_zcopy) | registered, shared with the transport until completion | [`Posted`] |
//!
//! Active messages of one endpoint are delivered in the order they were accepted, exactly once. There is no order between
//! endpoints.

use std::{fmt, io::IoSlice, ops::Deref, sync::Arc};

use crate::{
    am::AmId,
    completion::Completion,
    error::{Error, ErrorKind, Result, SendResult},
    fork::{Birth, gone_endpoint},
    mem::MemSlice,
};

/// What became of an accepted operation.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
#[must_use = "an operation in progress needs its completion, or a flush"]
pub enum Posted {
    /// Done already; the completion was left alone.
    Done,
    /// Under way; the completion, if one was given, counts it.
    InProgress,
}

/// How [`Endpoint::flush`] treats what is outstanding.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub enum FlushMode {
    /// Wait until the peer's transport has everything that was accepted before.
    Local,
    /// Give up: everything outstanding completes with `Canceled` (whether it was delivered is unknown), and the endpoint
    /// refuses everything but being destroyed.
    Cancel,
    /// Wait until remote memory is globally visible. No transport here can; they answer `Unsupported` rather than
    /// pretend.
    Remote,
}

/// What a pending request did when it was called.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
pub enum PendingStatus {
    /// Finished; it is removed.
    Done,
    /// Did a part; it stays first in line and is called again after the other endpoints had their turn.
    Partial,
    /// Its send said `NoResource`; it stays first in line.
    NoResource,
}

/// A request that waits for resources: called from `progress` with its endpoint, with no lock held.
pub type PendingFn = Box<dyn FnMut(&dyn Endpoint) -> PendingStatus + Send>;

/// Why [`Endpoint::pending_add`] did not queue a request. The request comes back.
pub enum PendingRefused {
    /// Resources are there right now: send at once. (Queueing could mean waiting for a wake-up that never comes.)
    Busy(PendingFn),
    /// The endpoint has failed or is closed.
    Failed(PendingFn, Error),
}

impl fmt::Debug for PendingRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PendingRefused::Busy(_) => f.write_str("Busy"),
            PendingRefused::Failed(_, e) => write!(f, "Failed({e})"),
        }
    }
}

/// Where a new endpoint leads.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct EpParams {
    /// Device and interface address of the peer: connect to that interface. `None`: make an unconnected endpoint, to be
    /// joined with [`Endpoint::connect`] after the two endpoint addresses were exchanged.
    pub remote: Option<(Vec<u8>, Vec<u8>)>,
    /// Which of the interface's network paths to take, from 0.
    pub path_index: u8,
    /// Any number; comes back in error reports.
    pub user_data: u64,
}

impl EpParams {
    /// An endpoint to the interface with these addresses.
    pub fn to_iface(device_addr: &[u8], iface_addr: &[u8]) -> Self {
        EpParams { remote: Some((device_addr.to_vec(), iface_addr.to_vec())), ..Self::default() }
    }

    /// An endpoint to be connected later.
    pub fn unconnected() -> Self {
        Self::default()
    }

    /// Takes the `index`-th network path.
    pub fn path_index(mut self, index: u8) -> Self {
        self.path_index = index;
        self
    }

    /// Tags the endpoint.
    pub fn user_data(mut self, data: u64) -> Self {
        self.user_data = data;
        self
    }
}

/// The operations of an endpoint. All of them return at once.
///
/// Common to the data calls: `SendError::NoResource` means that nothing happened (not connected yet, window or queue full,
/// older pending requests) and that `progress` will change that. `Failed` with `InvalidParam` names the argument that is out
/// of range; other kinds mean that the endpoint, the interface or the device is lost, as [`Error::scope`] says.
pub trait Endpoint: Send + Sync {
    /// Sends `header`, then `payload`; the receiver sees one string of bytes, the header first in native byte order.
    /// `8 + payload.len()` is at most `am.max_short`. Cost: one copy, no allocation.
    fn am_short(&self, id: AmId, header: u64, payload: &[u8]) -> SendResult<()>;

    /// Sends the pieces of `iov`, joined; at most `am.max_short` bytes in all.
    fn am_short_iov(&self, id: AmId, iov: &[IoSlice<'_>]) -> SendResult<()>;

    /// Calls `pack` with `am.max_bcopy` bytes of send buffer, or fewer if the peer has told that it takes fewer, and sends the
    /// first `n` of them, `n` being what `pack` returned. `pack` is called only when the message will be sent, with no lock held; it may itself send. Returns `n`.
    fn am_bcopy(&self, id: AmId, pack: &mut dyn FnMut(&mut [u8]) -> usize) -> SendResult<usize>;

    /// Sends `header` (copied; at most `am.max_hdr` bytes), then the registered pieces of `iov` (at most `am.max_iov`, in
    /// all with the header at most `am.max_zcopy` bytes), which the device reads in place until the operation completes.
    fn am_zcopy(&self, id: AmId, header: &[u8], iov: &[MemSlice], comp: Option<&Completion>) -> SendResult<Posted>;

    /// Completes when everything accepted before is dealt with, see [`FlushMode`].
    fn flush(&self, mode: FlushMode, comp: Option<&Completion>) -> SendResult<Posted>;

    /// Operations after the fence do not overtake those before it.
    fn fence(&self) -> SendResult<()>;

    /// Proves that the peer is alive: completes when it has answered, fails the endpoint if it does not.
    fn check(&self, comp: Option<&Completion>) -> SendResult<Posted>;

    /// Queues a request behind the others of this endpoint. While any is queued, direct sends are refused with
    /// `NoResource`, so that nothing is overtaken. Requests of different endpoints take turns.
    fn pending_add(&self, request: PendingFn) -> Result<(), PendingRefused>;

    /// Takes back all queued requests, oldest first, without calling them.
    fn pending_purge(&self) -> Vec<PendingFn>;

    /// This endpoint's address, for the peer's [`Endpoint::connect`].
    fn address(&self) -> Result<Vec<u8>>;

    /// Joins an unconnected endpoint with the peer's. No packet is sent.
    fn connect(&self, device_addr: &[u8], ep_addr: &[u8]) -> Result<()>;

    /// True if this endpoint leads to the interface with these addresses and, if it is given, to that endpoint. A local
    /// question: nothing is sent, and an endpoint whose handshake is under way answers true.
    fn is_connected(&self, device_addr: &[u8], iface_addr: &[u8], ep_addr: Option<&[u8]>) -> bool;

    /// Declares the peer dead: outstanding operations fail, then the error handler is called from `progress`.
    fn invalidate(&self) -> Result<()>;

    /// The interface's number of this endpoint; never used twice by one interface while either side may remember it.
    fn id(&self) -> u64;

    /// [`EpParams::user_data`].
    fn user_data(&self) -> u64;

    /// Flushes, then destroys; see [`Ep::close`].
    fn close_ep(self: Arc<Self>, comp: Option<Completion>);

    /// What [`Ep`]'s drop calls. Idempotent.
    fn destroy_ep(&self);
}

/// The handle of an endpoint. Dropping it destroys the endpoint.
///
/// Destroying returns queued pending requests (they are dropped), settles every outstanding completion with `Canceled`
/// before it returns (from inside a callback: when that batch of callbacks is over; from inside an async handler: in the
/// next `progress`), and calls nothing of the user's afterwards. What was accepted before is still delivered: the transport keeps the endpoint's record, resending and
/// acknowledging, until the peer has everything and the linger time is over. It never blocks.
///
/// In a child that was forked since it was made, calls fail and dropping does nothing, see [`fork`](crate::fork).
pub struct Ep {
    inner: Arc<dyn Endpoint>,
    born: Birth,
    closed: bool,
}

impl Ep {
    /// For transports.
    pub fn from_transport(inner: Arc<dyn Endpoint>) -> Self {
        Ep { inner, born: Birth::here(), closed: false }
    }

    /// Flushes and then destroys, without blocking: `comp`, if given, is settled when the peer has everything that was
    /// accepted before, or with the error that prevented it. Sends are refused from now on, and queued pending requests are dropped (purge them
    /// before, if they matter).
    pub fn close(mut self, comp: Option<Completion>) {
        if self.born.is_here() {
            self.closed = true;
            self.inner.clone().close_ep(comp);
        }
    }

    /// Destroys the endpoint: the same as dropping it.
    pub fn destroy(self) {}
}

impl Deref for Ep {
    type Target = dyn Endpoint;
    #[inline]
    fn deref(&self) -> &Self::Target {
        if self.born.is_here() { &*self.inner } else { gone_endpoint() }
    }
}

impl Drop for Ep {
    fn drop(&mut self) {
        if !self.born.is_here() {
            // The parent's: what it refers to must not end here.
            std::mem::forget(self.inner.clone());
        } else if !self.closed {
            self.inner.destroy_ep();
        }
    }
}

impl fmt::Debug for Ep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ep({:#x})", self.id())
    }
}

/// A failed endpoint, as the error handler sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EpFailure {
    /// [`Endpoint::id`].
    pub ep_id: u64,
    /// [`EpParams::user_data`].
    pub user_data: u64,
    /// What happened.
    pub kind: ErrorKind,
    /// In words: device, peer, how long it was silent, what was lost, what to do.
    pub error: Error,
}

impl EpFailure {
    /// For transports.
    pub fn new(ep_id: u64, user_data: u64, error: Error) -> Self {
        EpFailure { ep_id, user_data, kind: error.kind(), error }
    }
}

/// What the error handler wants done.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Hash, Default)]
pub enum FailureAction {
    /// Only this endpoint is affected.
    #[default]
    Endpoint,
    /// Fail all endpoints of the same peer interface now, each with one report of its own, instead of letting every one
    /// of them find out.
    WholePeer,
}

/// Called from `progress`, once per failed endpoint, after its outstanding operations were settled. Queued pending
/// requests are left for [`Endpoint::pending_purge`]. Then the user destroys the endpoint.
pub type ErrorHandler = Arc<dyn Fn(&EpFailure) -> FailureAction + Send + Sync>;
