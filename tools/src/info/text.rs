//! Laying out text.

/// Columns of a line. Fixed, so that output is the same in a terminal, a pipe and a log.
pub(super) const WIDTH: usize = 100;

/// Breaks `text` at spaces into lines that start with `first` and then `rest`, and are at most [`WIDTH`] long where words
/// allow it.
pub(super) fn wrap(out: &mut String, first: &str, rest: &str, text: &str) {
    let mut line = first.to_string();
    let mut empty = true;
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            push_line(out, &line);
            line = rest.to_string();
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    push_line(out, &line);
}

/// Appends a line without blanks at its end.
pub(super) fn push_line(out: &mut String, line: &str) {
    out.push_str(line.trim_end());
    out.push('\n');
}

/// Appends (name, value) lines with the values under one another.
pub(super) fn columns<N: AsRef<str>, V: AsRef<str>>(out: &mut String, indent: usize, rows: &[(N, V)]) {
    let width = rows.iter().map(|(name, _)| name.as_ref().chars().count()).max().unwrap_or(0);
    for (name, value) in rows {
        let head = format!("{:indent$}{:width$}  ", "", name.as_ref());
        wrap(out, &head, &" ".repeat(indent + width + 2), value.as_ref());
    }
}

/// Bytes as a person reads them: exact, with a unit of 1024 where it divides.
pub(super) fn bytes(n: usize) -> String {
    match n {
        n if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
        n if n >= 1 << 13 && n.is_multiple_of(1 << 10) => format!("{} KiB", n >> 10),
        1 => "1 byte".into(),
        n => format!("{n} bytes"),
    }
}
