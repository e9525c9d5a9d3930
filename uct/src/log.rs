//! Logs of the tools.
//!
//! The library logs through `tracing` and never installs a subscriber: that is the program's affair. A tool that has none
//! of its own calls [`init`] (cargo feature `log`), which honours `UCX_LOG_LEVEL` and `UCX_LOG_FILE`.

#[cfg(feature = "log")]
pub use subscriber::init;

#[cfg(feature = "log")]
mod subscriber {
    use std::{fs::File, io, sync::Mutex};

    use tracing_subscriber::fmt::writer::BoxMakeWriter;

    use crate::{
        config::{Env, ProcessConfig},
        error::{Error, ErrorKind, Result},
    };

    /// Installs a subscriber for the whole process that writes what `UCX_LOG_LEVEL` (default `warn`) asks for to where
    /// `UCX_LOG_FILE` says (default: standard error, so that results on standard output stay clean). Does nothing if the
    /// program has installed one before.
    ///
    /// # Errors
    /// `InvalidConfig` for a bad level; `Io` if the file cannot be made.
    pub fn init(env: &Env) -> Result<()> {
        let config = ProcessConfig::from_env(env)?;
        let (writer, ansi) = match config.log_file.as_str() {
            "" | "stderr" => (BoxMakeWriter::new(io::stderr), is_terminal(&io::stderr())),
            "stdout" => (BoxMakeWriter::new(io::stdout), is_terminal(&io::stdout())),
            path => (BoxMakeWriter::new(Mutex::new(create(&expand(path))?)), false),
        };
        // An error means that there is a subscriber already, and the first one wins.
        let _ = tracing_subscriber::fmt()
            .with_max_level(config.log_level.level())
            .with_writer(writer)
            .with_ansi(ansi)
            .try_init();
        Ok(())
    }

    fn is_terminal(stream: &impl io::IsTerminal) -> bool {
        stream.is_terminal() && std::env::var_os("NO_COLOR").is_none()
    }

    fn create(path: &str) -> Result<File> {
        File::create(path).map_err(|e| {
            let error = Error::new(ErrorKind::Io, format!("UCX_LOG_FILE={path}: cannot be written"));
            match e.raw_os_error() {
                Some(errno) => error.with_errno(errno),
                None => error,
            }
        })
    }

    fn expand(path: &str) -> String {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        path.replace("%p", &std::process::id().to_string()).replace("%h", host.trim())
    }
}
