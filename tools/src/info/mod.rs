//! `uct_info`: what the library can do on this host. Start reading at [`run`].
//!
//! Everything is written to a string first and printed at the end, so that output is never half-finished, and a reader
//! that goes away early (`uct_info -cf | head`) is no error.

mod devices;
mod reach;
mod settings;
mod text;
mod version;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::{CommandFactory, Parser};
#[cfg(any(test, uct_fuzz))]
pub(crate) use reach::parse as parse_address;
use uct::{Registry, Result, config::Env};

/// Shows version, devices, transports and settings of the messaging library on this host.
#[derive(Parser, Debug, Clone, Default)]
#[command(name = "uct_info", disable_version_flag = true, max_term_width = 100)]
pub struct Options {
    /// Show the version, and the transports and devices that are built in.
    #[arg(short = 'v', long)]
    pub version: bool,

    /// Show devices, their ports and addresses, and what each transport can do on them.
    #[arg(short = 'd', long)]
    pub devices: bool,

    /// Show counters with the devices, such as those of the address-handle cache.
    #[arg(short = 's', long, requires = "devices")]
    pub counters: bool,

    /// Show settings, in the form of a ucx.conf file.
    #[arg(short = 'c', long)]
    pub config: bool,

    /// With -c: document each setting: what it does, what it accepts, its names, its default, where its value came from.
    #[arg(short = 'f', long, requires = "config")]
    pub full: bool,

    /// Show which local devices can reach a peer, and why the others cannot. ADDRESS is an IP address, or a device
    /// address in hexadecimal digits, as -d shows it.
    #[arg(short = 'r', long, value_name = "ADDRESS")]
    pub reach: Option<String>,

    /// Show only devices and settings whose name contains this text, in any case. `NAME:PORT` is a port of a device, as
    /// uct_perf takes it.
    #[arg(value_name = "TEXT")]
    pub filter: Option<String>,
}

impl Options {
    /// True if a name passes the filter.
    fn shows(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|f| name.to_ascii_lowercase().contains(&f.to_ascii_lowercase()))
    }

    /// True if a device passes the filter, and which of its ports: all, or one.
    fn shows_device(&self, name: &str) -> (bool, Option<u8>) {
        let by_port = self.filter.as_ref().and_then(|f| f.rsplit_once(':'));
        match by_port.and_then(|(device, port)| Some((device, port.parse().ok()?))) {
            Some((device, port)) => (name.eq_ignore_ascii_case(device), Some(port)),
            None => (self.shows(name), None),
        }
    }

    fn asks_nothing(&self) -> bool {
        !(self.version || self.devices || self.config || self.reach.is_some())
    }
}

/// The output, and what is wrong, to be said on standard error at the end.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// For standard output.
    pub text: String,
    /// Mistakes of the user, such as a setting that does not parse.
    pub problems: Vec<String>,
}

/// Does what `options` ask for.
///
/// # Errors
/// What keeps it from finding out. Devices and transports that do not work are no errors but part of the output.
pub fn run(options: &Options, registry: &Registry, env: &Env) -> Result<Report> {
    let mut report = Report::default();
    if options.asks_nothing() {
        report.text = Options::command().render_help().to_string();
        return Ok(report);
    }
    let mut parts = Vec::new();
    if options.version {
        parts.push(version::render(registry));
    }
    if options.devices {
        parts.push(devices::render(options, registry, env)?);
    }
    if let Some(address) = &options.reach {
        parts.push(reach::render(address, options, registry, env)?);
    }
    if options.config {
        parts.push(settings::render(options, registry.settings(), env, &mut report.problems));
    }
    report.text = parts.join("\n");
    Ok(report)
}

/// The program: parses the command line, prints, and tells how it went.
pub fn main(registry: &Registry, env: &Env) -> ExitCode {
    let options = Options::parse();
    let report = match run(&options, registry, env) {
        Ok(report) => report,
        Err(e) => {
            eprintln!("uct_info: {e}");
            return ExitCode::FAILURE;
        }
    };
    if let Err(e) = print(&mut io::stdout().lock(), &report.text) {
        eprintln!("uct_info: standard output: {e}");
        return ExitCode::FAILURE;
    }
    for problem in &report.problems {
        eprintln!("uct_info: {problem}");
    }
    if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Writes everything. A reader that has seen enough is no error.
fn print(out: &mut impl Write, text: &str) -> io::Result<()> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests;
