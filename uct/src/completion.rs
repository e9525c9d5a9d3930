//! Counted completions: N operations, one notification.
//!
//! A [`Completion`] is handed to any number of operations. Each operation that is *accepted and not yet done* takes a
//! [`CompletionToken`]; one that is done at once, or refused, leaves the completion alone. When the user's handle is
//! dropped (or [`Completion::seal`]ed) and every token is settled, the callback runs, exactly once. The first error
//! sticks. A token that is dropped without being settled counts as `Canceled`, so a completion cannot be left waiting for
//! ever.
//!
//! ```
//! use uct::completion::Completion;
//! let (comp, status) = Completion::polled();
//! let token = comp.token(); // a transport does this for an operation it accepts
//! drop(comp); // no more operations to come
//! assert_eq!(status.poll(), None);
//! token.settle(Ok(()));
//! assert_eq!(status.poll(), Some(Ok(())));
//! ```

use std::{fmt, sync::OnceLock};

use crate::{
    error::ErrorKind,
    sync::{Arc, AtomicUsize, Mutex, Ordering},
};

type Callback = Box<dyn FnOnce(Result<(), ErrorKind>) + Send>;

struct Inner {
    /// Unsettled tokens, plus one for the user's handle.
    count: AtomicUsize,
    error: OnceLock<ErrorKind>,
    callback: Mutex<Option<Callback>>,
}

impl Inner {
    fn result(&self) -> Result<(), ErrorKind> {
        self.error.get().map_or(Ok(()), |&e| Err(e))
    }

    fn release(&self) {
        // AcqRel: whoever brings the count to zero sees every error that was stored before.
        if self.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            let callback = self.callback.lock().take();
            if let Some(f) = callback {
                f(self.result());
            }
        }
    }
}

/// The user's side of a counted completion. Not `Clone`: dropping it says that no operation will be added.
pub struct Completion(Arc<Inner>);

impl Completion {
    /// A completion that calls `f` when all its operations are done: from `progress` or from `destroy`, with no lock of
    /// the library held, so that `f` may send, connect and destroy. If no operation took a token, `f` is called when the
    /// handle is dropped.
    pub fn new(f: impl FnOnce(Result<(), ErrorKind>) + Send + 'static) -> Self {
        Completion(Arc::new(Inner {
            count: AtomicUsize::new(1),
            error: OnceLock::new(),
            callback: Mutex::new(Some(Box::new(f))),
        }))
    }

    /// A completion without a callback, and the handle to poll it.
    pub fn polled() -> (Self, CompletionStatus) {
        let inner = Arc::new(Inner { count: AtomicUsize::new(1), error: OnceLock::new(), callback: Mutex::new(None) });
        (Completion(inner.clone()), CompletionStatus(inner))
    }

    /// Counts one more operation. For transports.
    pub fn token(&self) -> CompletionToken {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        CompletionToken(Some(self.0.clone()))
    }

    /// Says that no operation will be added. The same as dropping the handle.
    pub fn seal(self) {}
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Completion({} outstanding)", self.0.count.load(Ordering::Relaxed) - 1)
    }
}

/// Polls a completion made by [`Completion::polled`].
#[derive(Clone)]
pub struct CompletionStatus(Arc<Inner>);

impl CompletionStatus {
    /// `None` while an operation is outstanding or the [`Completion`] has not been dropped; then the result.
    pub fn poll(&self) -> Option<Result<(), ErrorKind>> {
        (self.0.count.load(Ordering::Acquire) == 0).then(|| self.0.result())
    }

    /// Operations that are not done.
    pub fn outstanding(&self) -> usize {
        self.0.count.load(Ordering::Acquire)
    }
}

impl fmt::Debug for CompletionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionStatus({:?})", self.poll())
    }
}

/// The transport's side: one accepted operation. Settle it with no lock held, since the user's callback may run.
#[must_use = "dropping a token cancels its operation"]
pub struct CompletionToken(Option<Arc<Inner>>);

impl CompletionToken {
    /// Reports the operation's result.
    pub fn settle(mut self, result: Result<(), ErrorKind>) {
        self.finish(result);
    }

    fn finish(&mut self, result: Result<(), ErrorKind>) {
        if let Some(inner) = self.0.take() {
            if let Err(e) = result {
                // The first error sticks; a later one changes nothing.
                let _ = inner.error.set(e);
            }
            inner.release();
        }
    }
}

impl Drop for CompletionToken {
    fn drop(&mut self) {
        self.finish(Err(ErrorKind::Canceled));
    }
}

impl fmt::Debug for CompletionToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CompletionToken")
    }
}

#[cfg(all(test, uct_loom))]
mod loom;

#[cfg(all(test, not(uct_loom)))]
mod tests {
    use super::*;

    #[test]
    fn fires_once_after_the_last_of_many_and_keeps_the_first_error() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let s = seen.clone();
        let comp = Completion::new(move |r| s.lock().push(r));
        let (a, b, c) = (comp.token(), comp.token(), comp.token());
        a.settle(Err(ErrorKind::EndpointTimeout));
        drop(comp);
        b.settle(Err(ErrorKind::Io));
        assert!(seen.lock().is_empty());
        c.settle(Ok(()));
        assert_eq!(*seen.lock(), [Err(ErrorKind::EndpointTimeout)]);
    }

    #[test]
    fn a_dropped_token_is_canceled() {
        let (comp, status) = Completion::polled();
        drop(comp.token());
        drop(comp);
        assert_eq!(status.poll(), Some(Err(ErrorKind::Canceled)));
    }

    #[test]
    fn does_not_fire_while_operations_may_be_added() {
        let (comp, status) = Completion::polled();
        comp.token().settle(Ok(()));
        assert_eq!(status.poll(), None);
        comp.token().settle(Ok(()));
        comp.seal();
        assert_eq!(status.poll(), Some(Ok(())));
    }

    #[test]
    fn the_callback_may_use_its_own_completion_type_again() {
        let (inner, status) = Completion::polled();
        let token = inner.token();
        drop(inner);
        let outer = Completion::new(move |r| token.settle(r));
        drop(outer);
        assert_eq!(status.poll(), Some(Ok(())));
    }
}
