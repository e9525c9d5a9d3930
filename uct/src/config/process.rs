//! Settings of the whole process.

use super::{DeviceFilter, Env, Scope, TransportFilter, Value, choices};
use crate::error::Result;

/// How much is logged: UCX's levels, and which of the five levels of `tracing` each stands for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct LogLevel {
    name: &'static str,
    level: tracing::Level,
}

const LEVELS: [(&str, tracing::Level); 13] = [
    ("fatal", tracing::Level::ERROR),
    ("error", tracing::Level::ERROR),
    ("warn", tracing::Level::WARN),
    ("diag", tracing::Level::WARN),
    ("info", tracing::Level::INFO),
    ("debug", tracing::Level::DEBUG),
    ("trace", tracing::Level::TRACE),
    ("req", tracing::Level::TRACE),
    ("trace_req", tracing::Level::TRACE),
    ("data", tracing::Level::TRACE),
    ("async", tracing::Level::TRACE),
    ("func", tracing::Level::TRACE),
    ("poll", tracing::Level::TRACE),
];

impl LogLevel {
    /// The level of `tracing`.
    pub fn level(self) -> tracing::Level {
        self.level
    }
}

impl Value for LogLevel {
    const FORMS: &'static str = "fatal, error, warn, diag, info, debug, trace, req, data, async, func or poll";

    fn parse(text: &str) -> Result<Self, String> {
        let all = LEVELS.map(|(name, level)| (name, LogLevel { name, level }));
        choices(text, &all)
    }

    fn print(&self) -> String {
        self.name.into()
    }
}

crate::config_table! {
    /// Settings of the whole process.
    pub struct ProcessConfig ("Process") {
        /// Which transports may be used; ud stands for ud_verbs.
        transports: TransportFilter = "TLS", "all";
        /// Which devices and ports may be used, as device or device:port.
        net_devices: DeviceFilter = "NET_DEVICES", "all";
        /// How much the tools log; one line per packet needs trace. A program that uses the library installs its own
        /// subscriber, and then this setting is up to that program.
        log_level: LogLevel = "LOG_LEVEL", "warn";
        /// Where the tools log to: empty for standard error, stdout, or the path of a file in which %p stands for the
        /// process id and %h for the host name.
        log_file: String = "LOG_FILE", "";
        /// Warn about variables that start with UCX_ and that nobody reads.
        warn_unused_env_vars: bool = "WARN_UNUSED_ENV_VARS", "y";
    }
}

impl ProcessConfig {
    /// The settings have no prefix.
    pub const SCOPE: Scope = Scope { prefixes: &[""], transports: "all" };

    /// Reads the settings.
    ///
    /// # Errors
    /// `InvalidConfig` for the first value that does not parse.
    pub fn from_env(env: &Env) -> Result<Self> {
        Self::read(env, &Self::SCOPE)
    }
}
