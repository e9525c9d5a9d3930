//! What the library logs while a test runs.

use std::{fmt, sync::Arc};

use parking_lot::Mutex;
use tracing::{
    Dispatch, Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
    subscriber::NoSubscriber,
};

struct Lines {
    level: Level,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
                self.0 += &format!("{value:?}");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.lines.lock().push(text.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Runs `f` and returns what this thread has logged meanwhile, at `level` and above.
pub fn lines_of(level: Level, f: impl FnOnce()) -> Vec<String> {
    // While there is one subscriber only, whoever comes to a place first that logs decides for all threads whether it is heard,
    // by what his own thread has. With a second one all are asked.
    let _second = Dispatch::new(NoSubscriber::new());
    let lines = Arc::<Mutex<Vec<String>>>::default();
    tracing::subscriber::with_default(Lines { level, lines: lines.clone() }, f);
    std::mem::take(&mut *lines.lock())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say_so() {
        tracing::info!("so");
    }

    #[test]
    fn a_place_that_a_deaf_thread_came_to_first_is_heard() {
        let lines = lines_of(Level::INFO, || {
            std::thread::spawn(say_so).join().expect("it only talks");
            say_so();
        });
        assert_eq!(lines, ["so"]);
    }
}
