//! Shows what the library can do on this host: version, devices and transports with their limits, settings.

use std::process::ExitCode;

fn main() -> ExitCode {
    let env = uct_tools::environment();
    if let Err(e) = uct::log::init(&env) {
        eprintln!("uct_info: {e}");
        return ExitCode::FAILURE;
    }
    uct_tools::info::main(&uct_tools::registry(), &env)
}
