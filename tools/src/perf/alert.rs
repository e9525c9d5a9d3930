//! The flag that interrupts the measuring loops: one relaxed load per turn while nothing is wrong.

use std::sync::atomic::{AtomicBool, Ordering};

/// Raised by whoever has news for the main thread: the control connection's reader, the endpoint's error handler, a wrong
/// message.
#[derive(Debug, Default)]
pub(crate) struct Alert(AtomicBool);

impl Alert {
    /// Asks the main thread to look. What it shall find must be stored before.
    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether there is news.
    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Lowers the flag; true if it was raised. Look for the news afterwards.
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Acquire)
    }
}
