//! [`Growth`]: buffers that are being registered in the background, see [`Md::register_later`](crate::md::Md::register_later).

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use parking_lot::Mutex;
use uct::{
    Error, ErrorKind, Result,
    mem::{Buf, Registration},
};

use crate::ah::AhWaker;

/// Buffers in registered memory, and the registration that must outlive their use by the device.
pub type Registered = Result<(Vec<Buf>, Box<dyn Registration>)>;

/// Buffers on their way. Dropping it gives up what comes.
pub struct Growth(Arc<Slot>);

struct Slot {
    ready: AtomicBool,
    result: Mutex<Option<Registered>>,
}

/// The other end of a [`Growth`]: kept, or broken by its drop.
pub(crate) struct Promise {
    slot: Arc<Slot>,
    wake: AhWaker,
}

impl Growth {
    pub(crate) fn new(wake: AhWaker) -> (Growth, Promise) {
        let slot = Arc::new(Slot { ready: AtomicBool::new(false), result: Mutex::new(None) });
        (Growth(slot.clone()), Promise { slot, wake })
    }

    /// Takes the result, once it is there. Costs a load while it is not.
    pub fn take(&self) -> Option<Registered> {
        if !self.0.ready.load(Ordering::Acquire) {
            return None;
        }
        self.0.result.lock().take()
    }
}

impl fmt::Debug for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Growth(ready: {})", self.0.ready.load(Ordering::Relaxed))
    }
}

impl Promise {
    pub(crate) fn keep(self, result: Registered) {
        *self.slot.result.lock() = Some(result);
        // `drop` tells.
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        // Unkept: the domain was closed before anybody came to it.
        self.slot
            .result
            .lock()
            .get_or_insert_with(|| Err(Error::new(ErrorKind::Closed, "the memory domain is closed: no more buffers")));
        self.slot.ready.store(true, Ordering::Release);
        (self.wake)();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn a_promise_is_kept_or_broken_and_wakes_either_way() {
        let woken = Arc::new(AtomicUsize::new(0));
        let wake: AhWaker = {
            let woken = woken.clone();
            Arc::new(move || {
                woken.fetch_add(1, Ordering::Relaxed);
            })
        };
        let (growth, promise) = Growth::new(wake.clone());
        assert!(growth.take().is_none());
        promise.keep(Err(Error::new(ErrorKind::NoMemory, "full")));
        assert_eq!(growth.take().unwrap().err().unwrap().kind(), ErrorKind::NoMemory);
        assert!(growth.take().is_none(), "once");
        let (growth, promise) = Growth::new(wake);
        drop(promise);
        assert_eq!(growth.take().unwrap().err().unwrap().kind(), ErrorKind::Closed);
        assert_eq!(woken.load(Ordering::Relaxed), 2);
    }
}
