//! Errors: what went wrong, how much it costs ([`Scope`]) and whose fault it is ([`Blame`]).
//!
//! Two types share one vocabulary. [`ErrorKind`] is a small `Copy` value: completions and error handlers carry it.
//! [`Error`] adds the words an operator needs (device, GID, peer, errno, the knob to turn); calls return it. Data calls
//! return [`SendError`], where back-pressure ([`SendError::NoResource`]) is a variant of its own and cannot be taken for a
//! failure.

use std::{fmt, sync::Arc};

/// What went wrong.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is outside its documented range. Fix the call.
    InvalidParam,
    /// A setting (environment variable, file, builder) does not parse or is out of range.
    InvalidConfig,
    /// An address (device, interface or endpoint) is malformed.
    InvalidAddress,
    /// The object cannot do this. Look at the interface attributes first.
    Unsupported,
    /// No path leads from the local device to the given address.
    Unreachable,
    /// The peer was never heard, though packets were sent to it until the time-out.
    NeverAnswered,
    /// The peer was connected and then stayed silent until the time-out.
    EndpointTimeout,
    /// The peer closed the endpoint, or a new process stands at its address.
    ConnectionReset,
    /// The operation was given up by this side. Whether it was delivered is unknown.
    Canceled,
    /// The endpoint is not connected (yet), and the call needs it to be.
    NotConnected,
    /// Memory, or a device table, is exhausted.
    NoMemory,
    /// A limit of the library or the device would be exceeded.
    ExceedsLimit,
    /// There is no such device, or none that can be used.
    NoDevice,
    /// The object was closed.
    Closed,
    /// The thing exists already.
    AlreadyExists,
    /// A system call or the device failed. The errno, where there is one, is in the [`Error`].
    Io,
    /// A remote key whose region or owner has changed.
    StaleHandle,
    /// The process was forked after the device was opened; the child must not use it.
    UsedAfterFork,
}

impl ErrorKind {
    /// A few plain words, lower case.
    pub const fn text(self) -> &'static str {
        match self {
            ErrorKind::InvalidParam => "invalid parameter",
            ErrorKind::InvalidConfig => "invalid setting",
            ErrorKind::InvalidAddress => "invalid address",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::Unreachable => "unreachable",
            ErrorKind::NeverAnswered => "peer never answered",
            ErrorKind::EndpointTimeout => "endpoint timeout",
            ErrorKind::ConnectionReset => "connection reset by peer",
            ErrorKind::Canceled => "canceled",
            ErrorKind::NotConnected => "not connected",
            ErrorKind::NoMemory => "out of memory",
            ErrorKind::ExceedsLimit => "limit exceeded",
            ErrorKind::NoDevice => "no such device",
            ErrorKind::Closed => "closed",
            ErrorKind::AlreadyExists => "already exists",
            ErrorKind::Io => "input/output error",
            ErrorKind::StaleHandle => "stale handle",
            ErrorKind::UsedAfterFork => "used after fork",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// How much an error costs: the smallest object that can no longer be used as before.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Scope {
    /// This operation only.
    Operation,
    /// The endpoint: destroy it and make a new one.
    Endpoint,
    /// The interface: close it and open a new one.
    Interface,
    /// The device (memory domain): open it again.
    Device,
}

/// Who has to change something.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Blame {
    /// The calling program.
    Caller,
    /// The settings of this process.
    Config,
    /// The remote process.
    Peer,
    /// The path between the two.
    Network,
    /// This host: its device, its kernel, its limits.
    System,
}

/// An error with the words that explain it. Cloning is cheap.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: ErrorKind,
    scope: Scope,
    blame: Blame,
    errno: Option<i32>,
    text: String,
}

impl Error {
    /// An error of `kind` explained by `text`: one sentence that names the thing, its value and the way out.
    ///
    /// Scope and blame start at what is usual for the kind; [`Error::scoped`] and [`Error::blaming`] change them.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        use ErrorKind as K;
        let (scope, blame) = match kind {
            K::InvalidParam | K::Unsupported | K::AlreadyExists | K::Closed => (Scope::Operation, Blame::Caller),
            K::NotConnected | K::Canceled | K::StaleHandle => (Scope::Operation, Blame::Caller),
            K::InvalidConfig => (Scope::Interface, Blame::Config),
            K::InvalidAddress => (Scope::Operation, Blame::Peer),
            K::Unreachable | K::NeverAnswered | K::EndpointTimeout => (Scope::Endpoint, Blame::Network),
            K::ConnectionReset => (Scope::Endpoint, Blame::Peer),
            K::NoMemory | K::ExceedsLimit => (Scope::Operation, Blame::System),
            K::NoDevice | K::Io => (Scope::Device, Blame::System),
            K::UsedAfterFork => (Scope::Device, Blame::Caller),
        };
        Error(Arc::new(Inner { kind, scope, blame, errno: None, text: text.into() }))
    }

    fn edit(mut self, f: impl FnOnce(&mut Inner)) -> Self {
        match Arc::get_mut(&mut self.0) {
            Some(inner) => {
                f(inner);
                self
            }
            None => {
                let o = &*self.0;
                let mut inner =
                    Inner { kind: o.kind, scope: o.scope, blame: o.blame, errno: o.errno, text: o.text.clone() };
                f(&mut inner);
                Error(Arc::new(inner))
            }
        }
    }

    /// The same error with another scope.
    pub fn scoped(self, scope: Scope) -> Self {
        self.edit(|i| i.scope = scope)
    }

    /// The same error with another blame.
    pub fn blaming(self, blame: Blame) -> Self {
        self.edit(|i| i.blame = blame)
    }

    /// The same error with the errno it came from (capture it right after the call, before logging).
    pub fn with_errno(self, errno: i32) -> Self {
        self.edit(|i| i.errno = Some(errno))
    }

    /// The same error with `context: ` in front of its text.
    pub fn context(self, context: impl fmt::Display) -> Self {
        self.edit(|i| i.text = format!("{context}: {}", i.text))
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// How much it costs.
    pub fn scope(&self) -> Scope {
        self.0.scope
    }

    /// Who has to change something.
    pub fn blame(&self) -> Blame {
        self.0.blame
    }

    /// The errno of the system call or verbs call that failed.
    pub fn errno(&self) -> Option<i32> {
        self.0.errno
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.kind, self.0.text)?;
        if let Some(e) = self.0.errno {
            write!(f, " (errno {e}: {})", errno_text(e))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({self}; scope {:?}, blame {:?})", self.0.scope, self.0.blame)
    }
}

impl std::error::Error for Error {}

/// The system's words for an errno.
pub fn errno_text(errno: i32) -> String {
    let s = std::io::Error::from_raw_os_error(errno).to_string();
    // std appends " (os error N)", which would repeat the number we print ourselves.
    match s.find(" (os error") {
        Some(i) => s[..i].to_string(),
        None => s,
    }
}

/// The library's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a data call did not accept an operation.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SendError {
    /// Back-pressure: nothing happened, no callback ran. Retry after `progress`, or hand the retry to `pending_add`.
    #[error("no resource: retry after progress, or use pending_add")]
    NoResource,
    /// The operation failed and a retry will not help.
    #[error(transparent)]
    Failed(#[from] Error),
}

impl SendError {
    /// True for back-pressure.
    pub fn is_no_resource(&self) -> bool {
        matches!(self, SendError::NoResource)
    }
}

/// The result of a data call.
pub type SendResult<T> = std::result::Result<T, SendError>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_kind_text_and_errno() {
        let e = Error::new(ErrorKind::Io, "soft0: bind 127.0.0.1:4791").with_errno(libc::EADDRINUSE);
        let s = e.to_string();
        assert!(s.starts_with("input/output error: soft0: bind 127.0.0.1:4791 (errno 98: "), "{s}");
        assert!(!s.contains("os error"), "{s}");
    }

    #[test]
    fn edit_of_a_shared_error_leaves_the_other_alone() {
        let a = Error::new(ErrorKind::InvalidParam, "x");
        let b = a.clone().scoped(Scope::Device).context("open");
        assert_eq!(a.scope(), Scope::Operation);
        assert_eq!(b.scope(), Scope::Device);
        assert_eq!(b.to_string(), "invalid parameter: open: x");
    }
}
