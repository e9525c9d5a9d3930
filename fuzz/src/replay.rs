//! Replays the committed inputs of fuzz targets, without libFuzzer. Part of the `fuzz` module of each crate that has targets:
//! what was found once is tried by every `cargo test`, on every machine.

use std::{fs, path::Path};

/// A target: its name, which is that of its program and of its directories, and what it does with an input.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// Names the input that a target failed on.
struct Names<'a>(&'a Path);

impl Drop for Names<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the input is {}", self.0.display());
        }
    }
}

/// Gives each target every file of `fuzz/corpus/<name>` and `fuzz/crashes/<name>`, and what no corpus keeps: nothing at all.
pub(crate) fn replay(targets: &[Target]) {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    for (name, target) in targets {
        target(&[]);
        let mut inputs = Vec::new();
        for kind in ["corpus", "crashes"] {
            let dir = top.join(kind).join(name);
            inputs.extend(fs::read_dir(dir).into_iter().flatten().map(|file| file.expect("a file").path()));
        }
        // The order of a directory is arbitrary.
        inputs.sort();
        assert!(!inputs.is_empty(), "no inputs for {name} in {}", top.display());
        for path in &inputs {
            let _names = Names(path);
            target(&fs::read(path).expect("an input"));
        }
    }
}
