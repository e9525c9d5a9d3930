//! What handles lead to in a child: objects that answer every call with [`UsedAfterFork`](crate::ErrorKind::UsedAfterFork),
//! or with nothing. They touch nothing of the parent's.

use std::{
    any::Any,
    io::IoSlice,
    os::fd::RawFd,
    sync::{Arc, LazyLock},
};

use super::used_after_fork;
use crate::{
    AmId, Completion, EpParams, FlushMode, IfaceAttr, MemRegion, MemSlice, Posted, Result, SendError, SendResult, Time,
    am::{AmHandler, HandlerKind},
    ep::{Endpoint, PendingFn, PendingRefused},
    iface::{Arm, Counter, Events, Interface},
    md::{MemoryDomain, PortResource},
};

struct Gone;

/// In place of an endpoint of the parent's.
#[cold]
pub(crate) fn gone_endpoint() -> &'static dyn Endpoint {
    &Gone
}

/// In place of an interface of the parent's.
#[cold]
pub(crate) fn gone_interface() -> &'static dyn Interface {
    &Gone
}

/// In place of a memory domain of the parent's.
#[cold]
pub(crate) fn gone_md() -> &'static dyn MemoryDomain {
    &Gone
}

fn failed<T>() -> SendResult<T> {
    Err(SendError::Failed(used_after_fork()))
}

impl Endpoint for Gone {
    fn am_short(&self, _: AmId, _: u64, _: &[u8]) -> SendResult<()> {
        failed()
    }

    fn am_short_iov(&self, _: AmId, _: &[IoSlice<'_>]) -> SendResult<()> {
        failed()
    }

    fn am_bcopy(&self, _: AmId, _: &mut dyn FnMut(&mut [u8]) -> usize) -> SendResult<usize> {
        failed()
    }

    fn am_zcopy(&self, _: AmId, _: &[u8], _: &[MemSlice], _: Option<&Completion>) -> SendResult<Posted> {
        failed()
    }

    fn flush(&self, _: FlushMode, _: Option<&Completion>) -> SendResult<Posted> {
        failed()
    }

    fn fence(&self) -> SendResult<()> {
        failed()
    }

    fn check(&self, _: Option<&Completion>) -> SendResult<Posted> {
        failed()
    }

    fn pending_add(&self, request: PendingFn) -> Result<(), PendingRefused> {
        Err(PendingRefused::Failed(request, used_after_fork()))
    }

    fn pending_purge(&self) -> Vec<PendingFn> {
        Vec::new()
    }

    fn address(&self) -> Result<Vec<u8>> {
        Err(used_after_fork())
    }

    fn connect(&self, _: &[u8], _: &[u8]) -> Result<()> {
        Err(used_after_fork())
    }

    fn is_connected(&self, _: &[u8], _: &[u8], _: Option<&[u8]>) -> bool {
        false
    }

    fn invalidate(&self) -> Result<()> {
        Err(used_after_fork())
    }

    fn id(&self) -> u64 {
        u64::MAX
    }

    fn user_data(&self) -> u64 {
        0
    }

    fn close_ep(self: Arc<Self>, _: Option<Completion>) {}

    fn destroy_ep(&self) {}
}

impl Interface for Gone {
    fn attr(&self) -> &IfaceAttr {
        static ATTR: LazyLock<IfaceAttr> = LazyLock::new(|| IfaceAttr::empty("", "used after fork".into()));
        &ATTR
    }

    fn device_address(&self) -> Vec<u8> {
        Vec::new()
    }

    fn iface_address(&self) -> Vec<u8> {
        Vec::new()
    }

    fn is_reachable(&self, _: &[u8]) -> Result<(), String> {
        Err(used_after_fork().to_string())
    }

    fn create_ep(self: Arc<Self>, _: &EpParams) -> Result<Arc<dyn Endpoint>> {
        Err(used_after_fork())
    }

    fn set_am_handler(&self, _: AmId, _: Option<AmHandler>, _: HandlerKind) -> Result<()> {
        Err(used_after_fork())
    }

    fn flush(&self, _: FlushMode, _: Option<&Completion>) -> SendResult<Posted> {
        failed()
    }

    fn fence(&self) -> SendResult<()> {
        failed()
    }

    fn progress_enable(&self, _: bool) {}

    fn progress(&self) -> usize {
        0
    }

    fn progress_async(&self) -> usize {
        0
    }

    fn ring(&self) {}

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn arm(&self, _: Events) -> Result<Arm> {
        Err(used_after_fork())
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }

    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }

    fn close_iface(&self) {}
}

impl MemoryDomain for Gone {
    fn device_name(&self) -> String {
        "used after fork".into()
    }

    fn mem_alloc(&self, _: usize) -> Result<MemRegion> {
        Err(used_after_fork())
    }

    fn ports(&self) -> Result<Vec<PortResource>> {
        Err(used_after_fork())
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn counters(&self) -> Vec<Counter> {
        Vec::new()
    }
}
