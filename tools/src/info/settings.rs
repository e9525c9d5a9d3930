//! `uct_info -c`: every setting, in the form of a `ucx.conf` file, so that the output can be edited and read back.

use uct::config::{Catalog, Env, Setting};

use super::{
    Options,
    text::{push_line, wrap},
};

pub(super) fn render(options: &Options, catalog: &Catalog, env: &Env, problems: &mut Vec<String>) -> String {
    let mut out = String::new();
    for section in catalog.list(env) {
        let shown: Vec<&Setting> = section.settings.iter().filter(|s| is_shown(options, s)).collect();
        if shown.is_empty() {
            continue;
        }
        if !out.is_empty() {
            out.push('\n');
        }
        push_line(&mut out, "#");
        push_line(&mut out, &format!("# {} settings (transports: {})", section.title, section.transports));
        push_line(&mut out, "#");
        for setting in shown {
            if options.full {
                document(&mut out, setting);
            } else if setting.is_changed() {
                push_line(&mut out, &format!("# from {}, default {}", setting.origin, or_nothing(&setting.default)));
            }
            if let Some(error) = &setting.error {
                wrap(&mut out, "# NOT VALID: ", "#   ", &error.to_string());
                problems.push(error.to_string());
            }
            push_line(&mut out, &format!("{}={}", setting.name, setting.value));
        }
    }
    let unknown = catalog.unknown(env);
    if !unknown.is_empty() && options.filter.is_none() {
        out.push('\n');
        push_line(&mut out, "# Set, but read by nobody:");
        for u in unknown {
            push_line(&mut out, &format!("# {u}"));
        }
    }
    out
}

/// A filter matches the names of a setting, and its documentation.
fn is_shown(options: &Options, setting: &Setting) -> bool {
    setting.names.iter().any(|n| options.shows(n)) || options.shows(setting.field.doc())
}

fn or_nothing(text: &str) -> &str {
    if text.is_empty() { "empty" } else { text }
}

fn document(out: &mut String, setting: &Setting) {
    out.push('\n');
    wrap(out, "# ", "# ", setting.field.doc());
    let item = |out: &mut String, name: &str, text: &str| {
        wrap(out, &format!("#   {name:<8} "), "#            ", text);
    };
    let field = setting.field;
    match field.limit() {
        "" => item(out, "accepts", field.forms()),
        limit => item(out, "accepts", &format!("{}; {limit}", field.forms())),
    }
    if setting.names.len() > 1 {
        item(out, "names", &format!("{} (a later one wins)", setting.names.join(", ")));
    }
    item(out, "default", or_nothing(&setting.default));
    item(out, "origin", &setting.origin.to_string());
}
