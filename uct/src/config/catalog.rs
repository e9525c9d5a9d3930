//! [`Catalog`]: all settings of a program, for listings and for finding misspelt variables.

use super::{
    Env, Field, Origin, Scope, Table, env,
    known::{edit_distance, first_time, is_ucx_name},
};
use crate::error::Result;

/// A misspelling has at most this many wrong letters, as in UCX.
const NEAR: usize = 3;

/// A table and the names under which it is read.
#[derive(Copy, Clone, Debug)]
pub struct Section {
    /// The table.
    pub table: &'static Table,
    /// Its names.
    pub scope: &'static Scope,
}

impl Section {
    /// Every setting of the section, in the table's order.
    pub fn settings(&self, env: &Env) -> Vec<Setting> {
        self.table.fields.iter().map(|field| Setting::new(self.scope, field, env)).collect()
    }
}

/// A setting as it stands.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The variable that sets it: the one that did, else the one that wins over all others.
    pub name: String,
    /// Every variable that can set it, weakest first.
    pub names: Vec<String>,
    /// The text that holds, as printed values are written; as the user wrote it if it does not parse.
    pub value: String,
    /// The default, printed the same way.
    pub default: String,
    /// Where the value came from.
    pub origin: Origin,
    /// What is wrong with it, if it does not parse.
    pub error: Option<crate::Error>,
    /// Its declaration, with documentation and accepted forms.
    pub field: &'static Field,
}

impl Setting {
    fn new(scope: &Scope, field: &'static Field, env: &Env) -> Self {
        let names: Vec<String> = scope.names(field.name).collect();
        let default = field.canonical(field.default).unwrap_or_else(|_| field.default.to_string());
        let Some((text, origin)) = env.find(scope, field.name) else {
            let name = scope.strongest(field.name);
            return Setting {
                name,
                names,
                value: default.clone(),
                default,
                origin: Origin::Default,
                error: None,
                field,
            };
        };
        let name = origin.variable().unwrap_or_default().to_string();
        let (value, error) = match field.canonical(text) {
            Ok(value) => (value, None),
            Err(why) => (text.to_string(), Some(env::invalid(&name, text, origin, &why))),
        };
        Setting { name, names, value, default, origin: origin.clone(), error, field }
    }

    /// True if it differs from the default.
    pub fn is_changed(&self) -> bool {
        self.value != self.default
    }
}

/// The settings of one section.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The heading.
    pub title: &'static str,
    /// Who uses them.
    pub transports: &'static str,
    /// The settings.
    pub settings: Vec<Setting>,
}

/// A variable that nobody reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// Its name.
    pub name: String,
    /// Names that may have been meant, nearest first.
    pub suggestions: Vec<String>,
}

impl std::fmt::Display for Unknown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.suggestions.as_slice() {
            [] => write!(f, "unknown {}; uct_info -c lists the settings there are", self.name),
            names => write!(f, "unknown {}, did you mean {}?", self.name, names.join(" or ")),
        }
    }
}

/// The sections of all transports and devices in a program.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    sections: Vec<Section>,
}

impl Catalog {
    /// The catalog of these sections.
    pub fn new(sections: impl IntoIterator<Item = Section>) -> Self {
        Catalog { sections: sections.into_iter().collect() }
    }

    /// Adds sections.
    pub fn extend(&mut self, sections: impl IntoIterator<Item = Section>) {
        self.sections.extend(sections);
    }

    /// Its sections.
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Every setting with value, default and origin.
    pub fn list(&self, env: &Env) -> Vec<Listed> {
        let listed =
            |s: &Section| Listed { title: s.table.title, transports: s.scope.transports, settings: s.settings(env) };
        self.sections.iter().map(listed).collect()
    }

    /// The settings that differ from their defaults in one line, such as `UD_TIMEOUT=1m, IB_SL=3`. Empty if none does.
    pub fn changed(&self, env: &Env) -> String {
        let mut parts: Vec<String> = Vec::new();
        for setting in self.sections.iter().flat_map(|s| s.settings(env)).filter(Setting::is_changed) {
            let name = setting.name.strip_prefix("UCX_").unwrap_or(&setting.name);
            let part = format!("{name}={}", setting.value);
            // A table that several transports read says the same thing several times.
            if !parts.contains(&part) {
                parts.push(part);
            }
        }
        parts.join(", ")
    }

    /// Checks every value, so that a mistake shows at the start and not when the first user of the value comes.
    ///
    /// # Errors
    /// `InvalidConfig` for the first value that does not parse or is out of range.
    pub fn check(&self, env: &Env) -> Result<()> {
        match self.sections.iter().flat_map(|s| s.settings(env)).find_map(|s| s.error) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// The variables in `env` that nobody reads, neither here nor in UCX, with the names that may have been meant.
    ///
    /// Under the prefixes of the sections every unknown name counts; of other `UCX_` names only those that resemble one
    /// of ours or lack its prefix, because they may belong to a part of UCX that this library does not have.
    pub fn unknown(&self, env: &Env) -> Vec<Unknown> {
        let names: Vec<String> =
            self.sections.iter().flat_map(|s| s.table.fields.iter().flat_map(|f| s.scope.names(f.name))).collect();
        let prefixes: Vec<String> = self
            .sections
            .iter()
            .flat_map(|s| s.scope.prefixes.iter().filter(|p| !p.is_empty()).map(|p| format!("UCX_{p}")))
            .collect();
        let unread =
            env.variables().map(|(name, ..)| name).filter(|n| !is_ucx_name(n) && !names.iter().any(|k| k == n));
        unread
            .filter_map(|name| {
                let suggestions = self.suggestions(name, &names);
                let ours = prefixes.iter().any(|prefix| name.starts_with(prefix));
                (ours || !suggestions.is_empty()).then(|| Unknown { name: name.to_string(), suggestions })
            })
            .collect()
    }

    fn suggestions(&self, name: &str, names: &[String]) -> Vec<String> {
        // A field's name without the prefix it needs: name all variables it has.
        if let Some(bare) = name.strip_prefix("UCX_") {
            let section = self.sections.iter().find(|s| s.table.fields.iter().any(|f| f.name == bare));
            if let Some(section) = section {
                return section.scope.names(bare).collect();
            }
        }
        // A third of the letters that tell names apart may be wrong, so that short names do not match just anything.
        let limit = NEAR.min(name.len().saturating_sub("UCX_".len()) / 3);
        let nearest = names.iter().map(|n| (edit_distance(name, n, limit), n)).min();
        match nearest {
            Some((distance, n)) if distance <= limit => vec![n.clone()],
            _ => Vec::new(),
        }
    }

    /// Warns about [`Catalog::unknown`] variables, each once in the life of the process, unless
    /// `UCX_WARN_UNUSED_ENV_VARS` is off.
    pub fn warn_unknown(&self, env: &Env) {
        let on = super::ProcessConfig::from_env(env).map_or(true, |config| config.warn_unused_env_vars);
        if on {
            for unknown in self.unknown(env).into_iter().filter(|u| first_time(&u.name)) {
                tracing::warn!("{unknown}");
            }
        }
    }
}
