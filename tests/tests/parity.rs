//! `tests/PARITY.md` is true as far as a machine can tell: every row has an answer, every test that it names exists and is
//! run, and no row is lost.
//!
//! A test exists if its file has a function with `#[test]` of that name (not in a comment or a string, and not ignored), or a
//! function that one of the macros which make tests is told to run: `on_fabrics!`, or a `macro_rules!` of the file that has
//! `#[test] fn $name` in it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

// --- the page

/// What a row says.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Answer {
    /// Tests, as file and name.
    Tests(Vec<(String, String)>),
    /// A reason, and the tests it points to.
    Reason(Vec<(String, String)>),
    /// Something is missing.
    Open(Vec<(String, String)>),
}

impl Answer {
    fn parse(cell: &str) -> Result<Answer, String> {
        let tests = named_tests(cell)?;
        if let Some(reason) = cell.strip_prefix("— ") {
            return if reason.len() < 20 { Err("a reason in a word".into()) } else { Ok(Answer::Reason(tests)) };
        }
        if let Some(what) = cell.strip_prefix("open: ") {
            return if what.len() < 20 { Err("what is missing?".into()) } else { Ok(Answer::Open(tests)) };
        }
        let first = cell.strip_prefix('`').and_then(|c| c.split('`').next()).unwrap_or_default();
        match first.contains(".rs::") {
            true => Ok(Answer::Tests(tests)),
            false => Err("neither tests, nor `— ` and a reason, nor `open: `".into()),
        }
    }

    fn tests(&self) -> &[(String, String)] {
        match self {
            Answer::Tests(t) | Answer::Reason(t) | Answer::Open(t) => t,
        }
    }
}

/// Everything in backquotes that is a test: `path.rs::name`.
fn named_tests(cell: &str) -> Result<Vec<(String, String)>, String> {
    let parts: Vec<&str> = cell.split('`').collect();
    if parts.len().is_multiple_of(2) {
        return Err("a backquote is not closed".into());
    }
    let mut out = Vec::new();
    for quoted in parts.iter().skip(1).step_by(2) {
        if let Some((file, name)) = quoted.split_once(".rs::") {
            out.push((format!("{file}.rs"), name.to_string()));
        }
    }
    Ok(out)
}

#[derive(Debug)]
struct Row {
    line: usize,
    heading: String,
    name: String,
    answer: Answer,
}

/// The cells of a line of a table; `\|` is no end of a cell.
fn cells(line: &str) -> Vec<String> {
    let inner = line.trim().trim_start_matches('|').trim_end_matches('|').replace("\\|", "\u{0}");
    inner.split('|').map(|c| c.trim().replace('\u{0}', "|")).collect()
}

/// The number at the end of a heading, in brackets.
fn count_of(heading: &str) -> Option<usize> {
    heading.strip_suffix(')')?.rsplit_once('(')?.1.parse().ok()
}

/// All rows, and everything that is wrong with the page itself.
fn read_page(text: &str) -> (Vec<Row>, Vec<String>) {
    let (mut rows, mut wrong) = (Vec::<Row>::new(), Vec::new());
    // Open headings by level: line, text, number that they promise, rows before them.
    let mut open: Vec<(usize, usize, String, usize)> = Vec::new();
    let mut close = |open: &mut Vec<(usize, usize, String, usize)>, level: usize, so_far: usize| {
        while open.last().is_some_and(|h| h.0 >= level) {
            let (_, line, text, before) = open.pop().expect("it is there");
            match count_of(&text) {
                None => wrong.push(format!("line {line}: no number of rows in the heading `{text}`")),
                Some(n) if n != so_far - before => {
                    wrong.push(format!("line {line}: `{text}` promises {n} rows, there are {}", so_far - before));
                }
                Some(_) => {}
            }
        }
    };
    let mut bad_rows = Vec::new();
    let mut header_lines = 0;
    for (i, line) in text.lines().enumerate() {
        let number = i + 1;
        if let Some(level) = ["# ", "## ", "### "].iter().position(|p| line.starts_with(p)) {
            close(&mut open, level, rows.len());
            if level > 0 {
                open.push((level, number, line.trim_start_matches('#').trim().to_string(), rows.len()));
            }
            header_lines = 0;
        } else if line.starts_with('|') {
            header_lines += 1;
            if header_lines <= 2 {
                continue; // column titles and the line below them
            }
            let cells = cells(line);
            let (name, last) = (cells[0].clone(), cells.last().cloned().unwrap_or_default());
            let heading = open.last().map(|h| h.2.clone()).unwrap_or_default();
            match Answer::parse(&last) {
                Ok(answer) if cells.len() >= 2 => rows.push(Row { line: number, heading, name, answer }),
                Ok(_) => bad_rows.push(format!("line {number}: one cell")),
                Err(why) => bad_rows.push(format!("line {number}: {name}: {why}")),
            }
        } else {
            header_lines = 0;
        }
    }
    close(&mut open, 0, rows.len());
    wrong.extend(bad_rows);
    let mut seen = BTreeSet::new();
    for r in &rows {
        if !seen.insert((&r.heading, &r.name)) {
            wrong.push(format!("line {}: {} is there twice", r.line, r.name));
        }
    }
    (rows, wrong)
}

// --- the sources

/// Words and signs of a Rust source, without comments and literals.
fn tokens(text: &str) -> Vec<String> {
    let c: Vec<char> = text.chars().collect();
    let at = |i: usize| c.get(i).copied().unwrap_or('\0');
    let (mut out, mut i) = (Vec::new(), 0);
    while i < c.len() {
        match c[i] {
            '/' if at(i + 1) == '/' => {
                while i < c.len() && c[i] != '\n' {
                    i += 1;
                }
            }
            '/' if at(i + 1) == '*' => {
                let mut depth = 0;
                loop {
                    match (at(i), at(i + 1)) {
                        ('/', '*') => (depth, i) = (depth + 1, i + 2),
                        ('*', '/') => (depth, i) = (depth - 1, i + 2),
                        ('\0', _) => break,
                        _ => i += 1,
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
            '"' => i = after_string(&c, i),
            '\'' => {
                // A character, or a lifetime.
                if at(i + 1) == '\\' {
                    i += 2;
                    while i < c.len() && c[i] != '\'' {
                        i += 1;
                    }
                    i += 1;
                } else if at(i + 2) == '\'' {
                    i += 3;
                } else {
                    i += 1;
                }
            }
            w if w.is_alphanumeric() || w == '_' => {
                let from = i;
                while at(i).is_alphanumeric() || at(i) == '_' {
                    i += 1;
                }
                let word: String = c[from..i].iter().collect();
                let hashes = c[i..].iter().take_while(|x| **x == '#').count();
                let is_prefix = matches!(&*word, "r" | "b" | "c" | "br" | "cr");
                if is_prefix && at(i) == '"' && !word.contains('r') {
                    i = after_string(&c, i);
                } else if is_prefix && word.contains('r') && at(i + hashes) == '"' {
                    i = after_raw_string(&c, i + hashes, hashes);
                } else if word == "b" && at(i) == '\'' {
                    // A byte; its quote is looked at next.
                } else {
                    out.push(word);
                }
            }
            w if w.is_whitespace() => i += 1,
            sign => {
                out.push(sign.to_string());
                i += 1;
            }
        }
    }
    out
}

fn after_string(c: &[char], quote: usize) -> usize {
    let mut i = quote + 1;
    while i < c.len() && c[i] != '"' {
        i += if c[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

fn after_raw_string(c: &[char], quote: usize, hashes: usize) -> usize {
    let mut i = quote + 1;
    while i < c.len() {
        if c[i] == '"' && c[i + 1..].iter().take_while(|x| **x == '#').count() >= hashes {
            return i + 1 + hashes;
        }
        i += 1;
    }
    i
}

/// The index of the bracket that closes the one at `open`.
fn closing(t: &[String], open: usize) -> usize {
    let mut depth = 0;
    for (i, token) in t.iter().enumerate().skip(open) {
        match &**token {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i;
        }
    }
    t.len().saturating_sub(1)
}

/// Names of all tests of a source. A test in a module has its path as well: `module::name` and `name`.
fn tests_of(text: &str) -> BTreeSet<String> {
    let t = tokens(text);
    let is = |i: usize, what: &str| t.get(i).is_some_and(|x| x == what);
    let mut functions = BTreeSet::new();
    let mut makers = BTreeSet::from(["on_fabrics".to_string()]);
    let mut made: Vec<(String, Vec<String>)> = Vec::new();
    let mut out = BTreeSet::new();
    // Module of each open brace, if it is one.
    let mut scopes: Vec<Option<String>> = Vec::new();
    let mut attributes: Vec<String> = Vec::new();
    let mut i = 0;
    while i < t.len() {
        match &*t[i] {
            "#" if is(i + 1, "[") => {
                let end = closing(&t, i + 1);
                attributes.push(t[i + 2..end].concat());
                i = end + 1;
                continue;
            }
            "macro_rules" if is(i + 1, "!") => {
                // `( pattern ) => { .. #[test] fn $name .. }`
                let end = closing(&t, i + 3);
                let body = t[i + 3..end].join(" ");
                if body.contains("# [ test ] fn $ ") {
                    makers.insert(t[i + 2].clone());
                }
                i = end + 1;
                continue;
            }
            "mod" if is(i + 2, "{") => {
                scopes.push(Some(t[i + 1].clone()));
                attributes.clear();
                i += 3;
                continue;
            }
            "fn" if t.get(i + 1).is_some_and(|n| n.chars().all(|c| c.is_alphanumeric() || c == '_')) => {
                let name = &t[i + 1];
                functions.insert(name.clone());
                let is_test = attributes.iter().any(|a| a == "test");
                if is_test && !attributes.iter().any(|a| a.starts_with("ignore")) {
                    let path: Vec<&str> = scopes.iter().flatten().map(|s| &**s).chain([&**name]).collect();
                    out.insert(path.join("::"));
                    out.insert(name.clone());
                }
                attributes.clear();
            }
            "!" if i > 0 && (is(i + 1, "{") || is(i + 1, "(")) => {
                made.push((t[i - 1].clone(), t[i + 2..closing(&t, i + 1)].to_vec()));
            }
            "{" => {
                scopes.push(None);
                attributes.clear();
            }
            "}" => {
                scopes.pop();
                attributes.clear();
            }
            ";" => attributes.clear(),
            _ => {}
        }
        i += 1;
    }
    for (maker, inside) in made {
        if !makers.contains(&maker) {
            continue;
        }
        let mut parts = inside.split(|x| x == ";").collect::<Vec<_>>();
        if maker == "on_fabrics" {
            // The kinds of device come first, and again after `only`.
            parts.remove(0);
            parts.retain(|p| p.first().is_none_or(|w| w != "only"));
        }
        for name in parts.concat() {
            if functions.contains(&name) {
                out.insert(name);
            }
        }
    }
    out
}

#[test]
fn every_row_has_an_answer_and_every_test_exists() {
    let page = std::fs::read_to_string(root().join("tests/PARITY.md")).expect("tests/PARITY.md");
    let (rows, mut wrong) = read_page(&page);
    let mut files: HashMap<String, Option<BTreeSet<String>>> = HashMap::new();
    let mut named = BTreeSet::new();
    for row in &rows {
        for (file, name) in row.answer.tests() {
            let tests = files
                .entry(file.clone())
                .or_insert_with(|| std::fs::read_to_string(root().join(file)).ok().map(|text| tests_of(&text)));
            match tests {
                None => wrong.push(format!("line {}: {}: there is no file {file}", row.line, row.name)),
                Some(t) if !t.contains(name) => {
                    wrong.push(format!("line {}: {}: no test `{name}` in {file}", row.line, row.name));
                }
                Some(_) => {
                    named.insert((file.clone(), name.clone()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "tests/PARITY.md:\n{}", wrong.join("\n"));
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for row in &rows {
        let kind = match row.answer {
            Answer::Tests(_) => "with tests",
            Answer::Reason(_) => "with a reason",
            Answer::Open(_) => "open",
        };
        *counts.entry(kind).or_default() += 1;
    }
    println!("{} rows: {counts:?}; {} tests are named", rows.len(), named.len());
}

// --- this file's own tests

#[test]
fn what_counts_as_a_test() {
    let source = r##"
        // #[test] fn in_a_comment() {}
        /* #[test] /* nested */ fn in_another() {} */
        const S: &str = "#[test] fn in_a_string() {}";
        const R: &str = r#"" #[test] fn in_a_raw_string() {}"#;
        const C: [char; 2] = ['"', '\''];
        fn helper<'a>(x: &'a str) {}
        #[test]
        fn plain() { if true { } }
        #[cfg(unix)] #[test] #[should_panic]
        fn with_attributes() {}
        #[test] #[ignore = "slow"] fn ignored() {}
        mod inner { #[test] fn deep() {} mod more { #[test] fn deeper() {} } }
        proptest! { #[test] fn of_a_macro(x in any::<u8>()) {} }
        macro_rules! mine { ($($name:ident),+) => { $(#[test] fn $name() { super::$name() })+ }; }
        macro_rules! other { ($name:ident) => { fn $name() {} }; }
        mine! { made, without_a_body }
        other! { helper }
        fn made() {}
        on_fabrics! { sim, soft; generic, gone; only sim; alone }
        fn generic<F: Fabric>(w: World<F>) {}
        fn alone(w: World<Sim>) {}
        fn sim() {}
        fn soft() {}
    "##;
    let expected = [
        "alone",
        "deep",
        "deeper",
        "generic",
        "inner::deep",
        "inner::more::deeper",
        "made",
        "of_a_macro",
        "plain",
        "with_attributes",
    ];
    assert_eq!(tests_of(source).iter().map(String::as_str).collect::<Vec<_>>(), expected);
}

#[test]
fn what_a_page_must_have() {
    let page = |rows: &str| format!("# Title\n\n## Part (2)\n\n### One (1)\n\n| a | b |\n|---|---|\n{rows}");
    let good = page(
        "| x | `a.rs::t`, `b.rs::m::u`. A note |\n\n### Two (1)\n\n| a | b |\n|---|---|\n| y | — cannot be, for a reason |\n",
    );
    let (rows, wrong) = read_page(&good);
    assert_eq!(wrong, Vec::<String>::new());
    let tests = [("a.rs", "t"), ("b.rs", "m::u")].map(|(f, n)| (f.to_string(), n.to_string()));
    assert_eq!(rows[0].answer, Answer::Tests(tests.to_vec()));
    assert_eq!(rows[1].answer, Answer::Reason(Vec::new()));
    for (rows, why) in [
        ("", "promises 1 rows, there are 0"),
        ("| x | `a.rs::t` |\n| x | `a.rs::t` |\n", "twice"),
        ("| x | |\n", "neither tests"),
        ("| x | later |\n", "neither tests"),
        ("| x | `Foo::bar` |\n", "neither tests"),
        ("| x | — no |\n", "a reason in a word"),
        ("| x | open: soon |\n", "what is missing"),
        ("| x | `a.rs::t |\n", "not closed"),
    ] {
        let (_, wrong) = read_page(&page(rows));
        assert!(wrong.iter().any(|w| w.contains(why)), "{rows}: {wrong:?}");
    }
}
