//! `uct_info -v`.

use uct::Registry;

use super::text::columns;

pub(super) fn render(registry: &Registry) -> String {
    let join = |names: Vec<String>| if names.is_empty() { "none".to_string() } else { names.join(", ") };
    let transports = registry.transports().iter().map(|t| match t.aliases() {
        [] => t.name().to_string(),
        aliases => format!("{} (also {})", t.name(), aliases.join(", ")),
    });
    let rows = [
        ("uct_info", env!("CARGO_PKG_VERSION").to_string()),
        ("built for", format!("{} {}", std::env::consts::ARCH, std::env::consts::OS)),
        ("built as", if cfg!(debug_assertions) { "debug" } else { "release" }.to_string()),
        ("components", join(registry.components().iter().map(|c| c.name().to_string()).collect())),
        ("transports", join(transports.collect())),
        ("wire format", "UCX ud_verbs over RoCE v2, with extensions between peers that have them".to_string()),
    ];
    let mut out = String::new();
    columns(&mut out, 0, &rows);
    out
}
