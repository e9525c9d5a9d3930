//! Tables of settings: [`Field`], [`Table`], [`Scope`] and the [`config_table!`](crate::config_table) macro.

/// One setting of a table.
#[derive(Debug)]
pub struct Field {
    /// Its name without `UCX_` and prefix, for example `TX_QUEUE_LEN`.
    pub name: &'static str,
    /// Its default, in the form a user would write.
    pub default: &'static str,
    doc: &'static str,
    forms: &'static str,
    limit: &'static str,
    canonical: fn(&str) -> Result<String, String>,
}

impl Field {
    /// A field. `limit` says which parsed values are refused, or nothing; `canonical` parses and checks a text and prints
    /// the value again. Written by [`config_table!`](crate::config_table).
    pub const fn new(
        name: &'static str,
        default: &'static str,
        doc: &'static str,
        forms: &'static str,
        limit: &'static str,
        canonical: fn(&str) -> Result<String, String>,
    ) -> Self {
        Field { name, default, doc: doc.trim_ascii(), forms, limit, canonical }
    }

    /// What it does, in plain sentences.
    pub const fn doc(&self) -> &'static str {
        self.doc
    }

    /// The accepted form, such as "a whole number, or inf".
    pub const fn forms(&self) -> &'static str {
        self.forms
    }

    /// The range of values, such as "must be at least 2". Empty if whatever parses is accepted.
    pub const fn limit(&self) -> &'static str {
        self.limit
    }

    /// `text` in the form in which values of this field are printed.
    ///
    /// # Errors
    /// Why `text` is not a value of this field, and what is.
    pub fn canonical(&self, text: &str) -> Result<String, String> {
        (self.canonical)(text)
    }
}

/// A named list of settings that are read together.
#[derive(Debug)]
pub struct Table {
    /// A heading for listings.
    pub title: &'static str,
    /// The settings.
    pub fields: &'static [Field],
}

/// Under which names a table is read, and for whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope {
    /// Prefixes that follow `UCX_`, weakest first. They replace one another, they are not chained.
    pub prefixes: &'static [&'static str],
    /// The transports that use the values, for listings.
    pub transports: &'static str,
}

impl Scope {
    /// The variable that wins over all others for `field`.
    pub fn strongest(&self, field: &str) -> String {
        format!("UCX_{}{field}", self.prefixes.last().unwrap_or(&""))
    }

    /// All variables for `field`, weakest first.
    pub fn names(&self, field: &str) -> impl Iterator<Item = String> {
        self.prefixes.iter().map(move |p| format!("UCX_{p}{field}"))
    }
}

/// Declares a table of settings and the struct that holds their values.
///
/// The doc comment of a field is both its rustdoc and its text in `uct_info -c`, so it is plain sentences without links.
/// An optional `where` clause refuses values out of range with a message of its own.
///
/// ```
/// use uct::config::{Env, Scope};
///
/// uct::config_table! {
///     /// Settings of a toy.
///     pub struct ToyConfig ("Toy") {
///         /// How many wheels the toy has.
///         wheels: u32 = "WHEELS", "4", where |n| *n >= 2, "must be at least 2";
///     }
/// }
///
/// const SCOPE: Scope = Scope { prefixes: &["TOY_"], transports: "toy" };
/// assert_eq!(ToyConfig::default().wheels, 4);
/// assert_eq!(ToyConfig::read(&Env::from_pairs([("UCX_TOY_WHEELS", "3")]), &SCOPE)?.wheels, 3);
/// let error = ToyConfig::read(&Env::from_pairs([("UCX_TOY_WHEELS", "1")]), &SCOPE).unwrap_err();
/// assert!(error.to_string().contains("UCX_TOY_WHEELS=1: must be at least 2"));
/// # Ok::<(), uct::Error>(())
/// ```
#[macro_export]
macro_rules! config_table {
    (
        $(#[doc = $struct_doc:literal])+
        $vis:vis struct $name:ident ($title:literal) {
            $(
                $(#[doc = $doc:literal])+
                $field:ident : $ty:ty = $env:literal, $default:literal $(, where $check:expr, $message:literal)?;
            )+
        }
    ) => {
        $(#[doc = $struct_doc])+
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $name {
            $(
                $(#[doc = $doc])+
                #[doc = concat!("\n\nVariable `", $env, "`, default `", $default, "`.")]
                $vis $field: $ty,
            )+
        }

        impl $name {
            /// The table these settings are read from.
            $vis const TABLE: &'static $crate::config::Table = &$crate::config::Table {
                title: $title,
                fields: &[$(
                    $crate::config::Field::new(
                        $env,
                        $default,
                        concat!($($doc),+),
                        <$ty as $crate::config::Value>::FORMS,
                        concat!("" $(, $message)?),
                        |text| Ok($crate::config::Value::print(&$name::$field(text)?)),
                    ),
                )+],
            };

            /// Reads the settings from `env`, each under the prefixes of `scope`.
            ///
            /// # Errors
            /// `InvalidConfig` for the first value that does not parse or is out of range.
            $vis fn read(
                env: &$crate::config::Env,
                scope: &$crate::config::Scope,
            ) -> $crate::Result<Self> {
                Ok(Self {
                    $($field: env.value(scope, $env, $default, $name::$field)?,)+
                })
            }

            $(
                /// Parses and checks one value. The error says what is wrong and what is accepted.
                fn $field(text: &str) -> Result<$ty, String> {
                    let value = <$ty as $crate::config::Value>::parse(text).map_err(|why| {
                        let forms = <$ty as $crate::config::Value>::FORMS;
                        format!(concat!("{}; accepted: {}" $(, "; ", $message)?), why, forms)
                    })?;
                    $(
                        let check: fn(&$ty) -> bool = $check;
                        if !check(&value) {
                            return Err($message.to_string());
                        }
                    )?
                    Ok(value)
                }
            )+
        }

        impl Default for $name {
            fn default() -> Self {
                // The defaults are literals of this very table, and the tests of the crate parse each of them.
                Self { $($field: $name::$field($default).expect("a default parses"),)+ }
            }
        }
    };
}
