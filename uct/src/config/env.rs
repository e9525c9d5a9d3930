//! [`Env`]: where the values of settings come from.

use std::{collections::BTreeMap, fmt, path::Path};

use super::{Scope, known};
use crate::error::{Error, ErrorKind, Result};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The built-in default.
    Default,
    /// A line of a settings file.
    File {
        /// Its path.
        path: String,
        /// The line, from 1.
        line: usize,
        /// The variable's name there.
        name: String,
    },
    /// The environment variable of this name.
    Environment(String),
    /// The program set the variable of this name, see [`Env::set`].
    Program(String),
}

impl Origin {
    /// The name of the variable that gave the value; `None` for a default.
    pub fn variable(&self) -> Option<&str> {
        match self {
            Origin::Default => None,
            Origin::File { name, .. } | Origin::Environment(name) | Origin::Program(name) => Some(name),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, line, name } => write!(f, "{name} in {path} line {line}"),
            Origin::Environment(name) => write!(f, "environment variable {name}"),
            Origin::Program(name) => write!(f, "{name} set by the program"),
        }
    }
}

/// The layers, weakest first.
#[derive(Clone, Copy)]
enum Layer {
    File,
    Environment,
    Program,
}

const LAYERS: [Layer; 3] = [Layer::File, Layer::Environment, Layer::Program];

type Vars = BTreeMap<String, (String, Origin)>;

/// A source of settings: `ucx.conf` files < environment < values set by the program. Cheap to make, cloned freely, and
/// never looks at the process again after it was made.
#[derive(Clone, Debug, Default)]
pub struct Env {
    /// By layer; keys are variable names with the leading `UCX_`.
    layers: [Vars; 3],
}

impl Env {
    /// No variables at all: every setting has its default.
    pub fn empty() -> Self {
        Env::default()
    }

    /// The variables of this process and the `ucx.conf` files it finds in `/etc/ucx`, `$HOME`, `$UCX_CONFIG_DIR` and the
    /// current directory, of which the later wins.
    ///
    /// Files that do not exist or cannot be read are skipped.
    pub fn process() -> Self {
        Env::process_with_prefix("")
    }

    /// Like [`Env::process`] for a library that has variables of its own: with `prefix` `"MPI_"`, `MPI_UCX_X` beats
    /// `UCX_X`.
    pub fn process_with_prefix(prefix: &str) -> Self {
        let vars: Vec<(String, String)> = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.to_string_lossy().into_owned())))
            .collect();
        let mut env = Env::empty();
        let dir = |name: &str| vars.iter().find(|(k, v)| k == name && !v.is_empty()).map(|(_, v)| v.clone());
        let dirs = [Some("/etc/ucx".to_string()), dir("HOME"), dir("UCX_CONFIG_DIR"), Some(".".to_string())];
        let mut seen = Vec::new();
        for dir in dirs.into_iter().flatten() {
            let path = Path::new(&dir).join("ucx.conf");
            // The current directory is often one of the others; reading a file twice would be harmless but confusing.
            let Ok(real) = path.canonicalize() else { continue };
            if seen.contains(&real) {
                continue;
            }
            if let Ok(text) = std::fs::read_to_string(&real) {
                env.add_file_text(&path.display().to_string(), &text);
            }
            seen.push(real);
        }
        env.add_variables(vars.iter().map(|(k, v)| (k.as_str(), v.as_str())), prefix);
        env
    }

    /// The given variables, as if they were the environment. Names start with `UCX_`; others are ignored.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut env = Env::empty();
        env.add_variables(pairs, "");
        env
    }

    pub(super) fn add_variables<'a>(&mut self, pairs: impl IntoIterator<Item = (&'a str, &'a str)>, prefix: &str) {
        let mut strong = Vec::new();
        for (name, value) in pairs {
            if name.starts_with("UCX_") {
                self.put(Layer::Environment, name, value, Origin::Environment(name.to_string()));
            }
            if let Some(inner) = name.strip_prefix(prefix)
                && !prefix.is_empty()
                && inner.starts_with("UCX_")
            {
                strong.push((inner.to_string(), value.to_string(), name.to_string()));
            }
        }
        for (inner, value, name) in strong {
            self.put(Layer::Environment, &inner, &value, Origin::Environment(name));
        }
    }

    /// Adds the text of a `ucx.conf` file, over the files added before it. `path` is for messages.
    ///
    /// Lines are `UCX_NAME=value`; `#` and `;` start comments. A `[section]` holds values for certain machines and is
    /// skipped as a whole, because its filters are UCX's own.
    pub fn add_file_text(&mut self, path: &str, text: &str) {
        for (i, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with(['#', ';']) {
                continue;
            }
            if line.starts_with('[') {
                tracing::debug!("{path}: line {}: sections are not read, the rest of the file is skipped", i + 1);
                break;
            }
            match line.split_once('=') {
                Some((name, value)) if name.trim().starts_with("UCX_") => {
                    let (name, value) = (name.trim(), value.trim());
                    let origin = Origin::File { path: path.to_string(), line: i + 1, name: name.to_string() };
                    self.put(Layer::File, name, value, origin);
                }
                _ => tracing::warn!("{path}: line {}: not of the form UCX_NAME=value, ignored", i + 1),
            }
        }
    }

    /// Sets a variable from the program; it beats files and environment. `name` may omit `UCX_`.
    pub fn set(&mut self, name: &str, value: &str) {
        let full = if name.starts_with("UCX_") { name.to_string() } else { format!("UCX_{name}") };
        let origin = Origin::Program(full.clone());
        self.put(Layer::Program, &full, value, origin);
    }

    /// [`Env::set`] as a builder.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.set(name, value);
        self
    }

    fn put(&mut self, layer: Layer, name: &str, value: &str, origin: Origin) {
        let name = known::renamed(name).unwrap_or(name);
        self.layers[layer as usize].insert(name.to_string(), (value.to_string(), origin));
    }

    /// The text that wins for `field` in `scope`, and where it came from. `None`: the default holds.
    pub fn find(&self, scope: &Scope, field: &str) -> Option<(&str, &Origin)> {
        LAYERS.iter().rev().find_map(|&layer| {
            let vars = &self.layers[layer as usize];
            scope.prefixes.iter().rev().find_map(|prefix| {
                vars.get(&format!("UCX_{prefix}{field}")).map(|(value, origin)| (value.as_str(), origin))
            })
        })
    }

    /// The value of `field` in `scope`, through `parse`, whose error says what is wrong and what is accepted.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the variable and its value, with the error of `parse`.
    pub fn value<T>(
        &self,
        scope: &Scope,
        field: &str,
        default: &str,
        parse: fn(&str) -> Result<T, String>,
    ) -> Result<T> {
        let (text, origin) = match self.find(scope, field) {
            Some((text, origin)) => (text, origin.clone()),
            None => (default, Origin::Default),
        };
        parse(text).map_err(|why| invalid(&scope.strongest(field), text, &origin, &why))
    }

    /// Every variable there is, by name, with its value and origin; of a name that is set in several layers the winner.
    pub fn variables(&self) -> impl Iterator<Item = (&str, &str, &Origin)> {
        let mut all: BTreeMap<&str, (&str, &Origin)> = BTreeMap::new();
        for layer in LAYERS {
            all.extend(self.layers[layer as usize].iter().map(|(k, (v, o))| (k.as_str(), (v.as_str(), o))));
        }
        all.into_iter().map(|(name, (value, origin))| (name, value, origin))
    }
}

/// The error for a bad value.
pub(super) fn invalid(strongest: &str, text: &str, origin: &Origin, why: &str) -> Error {
    let place = match origin {
        Origin::File { path, line, .. } => format!(" ({path} line {line})"),
        _ => String::new(),
    };
    let name = origin.variable().unwrap_or(strongest);
    Error::new(ErrorKind::InvalidConfig, format!("{name}={text}{place}: {why}"))
}
