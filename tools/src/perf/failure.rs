//! Why a run ended early.

use std::{fmt, io};

/// The one message that the operator gets. It names the thing, its value and the way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// To be printed, and answered with exit status 1.
    Text(String),
    /// The reader of our output went away: nobody is there to be told.
    BrokenPipe,
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Failure::Text(text.into())
    }

    /// The same failure with `context: ` in front.
    pub(crate) fn context(self, context: impl fmt::Display) -> Self {
        match self {
            Failure::Text(t) => Failure::Text(format!("{context}: {t}")),
            Failure::BrokenPipe => self,
        }
    }

    /// The same failure with `; more` behind, if there is more to say.
    pub(crate) fn suffix(self, more: Option<String>) -> Self {
        match (self, more) {
            (Failure::Text(t), Some(more)) => Failure::Text(format!("{t}; {more}")),
            (same, _) => same,
        }
    }

    /// A failure to write the program's output.
    pub(crate) fn output(e: &io::Error) -> Self {
        if e.kind() == io::ErrorKind::BrokenPipe {
            Failure::BrokenPipe
        } else {
            Failure::Text(format!("cannot write the results: {}", plain(e)))
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Text(t) => f.write_str(t),
            Failure::BrokenPipe => f.write_str("the reader of the output went away"),
        }
    }
}

impl From<uct::Error> for Failure {
    fn from(e: uct::Error) -> Self {
        Failure::Text(e.to_string())
    }
}

/// The system's words for an I/O error, without the "(os error N)" that std appends.
pub(crate) fn plain(e: &io::Error) -> String {
    match e.raw_os_error() {
        Some(n) => uct::error::errno_text(n),
        None => e.to_string(),
    }
}

/// Text from the other side, fit for a terminal: no control characters, and not longer than a few lines.
pub(crate) fn clean(text: &str) -> String {
    const MAX: usize = 600;
    let mut out: String =
        text.chars().take(MAX).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect::<String>().trim().into();
    if text.chars().nth(MAX).is_some() {
        out.push_str("...");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_cannot_drive_the_terminal() {
        assert_eq!(clean("a\x1b[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(clean(&"x".repeat(5000)).len(), 603);
    }

    #[test]
    fn a_broken_pipe_is_not_a_message() {
        assert_eq!(Failure::output(&io::ErrorKind::BrokenPipe.into()), Failure::BrokenPipe);
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        assert!(Failure::output(&full).to_string().starts_with("cannot write the results: No space left"));
    }
}
