//! Completions whose operations end on several threads, in every interleaving. `ci/test --only loom` runs it.
//!
//! Seen to fail: with `Relaxed` instead of `AcqRel` in `release`, the callback may miss what an operation has written; with
//! the user's handle not counted, it runs while tokens are still given out; with a load in front of the subtraction instead
//! of its result, it runs twice or never.

use std::sync::Arc;

use ::loom::thread;

use super::*;
use crate::sync::AtomicUsize;

/// Memory that operations write.
type Memory = Arc<[AtomicUsize; 2]>;

fn memory() -> Memory {
    Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)])
}

fn operate(memory: &Memory, i: usize, token: CompletionToken, result: Result<(), ErrorKind>) {
    memory[i].store(1, Ordering::Relaxed);
    token.settle(result);
}

fn all_written(memory: &Memory) -> bool {
    memory.iter().all(|m| m.load(Ordering::Relaxed) == 1)
}

#[test]
fn the_callback_runs_once_and_sees_what_was_written() {
    ::loom::model(|| {
        let (memory, calls) = (memory(), Arc::new(AtomicUsize::new(0)));
        let comp = {
            let (memory, calls) = (memory.clone(), calls.clone());
            Completion::new(move |r| {
                assert!(all_written(&memory), "it runs before the operations are done");
                assert_eq!(r, Err(ErrorKind::Io));
                calls.fetch_add(1, Ordering::Relaxed);
            })
        };
        // The progress thread takes one while the other is still posted.
        let token = comp.token();
        let other = {
            let memory = memory.clone();
            thread::spawn(move || operate(&memory, 0, token, Err(ErrorKind::Io)))
        };
        let token = comp.token();
        drop(comp);
        operate(&memory, 1, token, Ok(()));
        other.join().unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn a_poll_that_says_done_sees_what_was_written() {
    ::loom::model(|| {
        let memory = memory();
        let (comp, status) = Completion::polled();
        let tokens = [comp.token(), comp.token()];
        drop(comp);
        let threads: Vec<_> = tokens
            .into_iter()
            .enumerate()
            .map(|(i, token)| {
                let memory = memory.clone();
                thread::spawn(move || operate(&memory, i, token, Ok(())))
            })
            .collect();
        if let Some(r) = status.poll() {
            assert!(r.is_ok() && all_written(&memory), "done before the operations are");
        }
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(status.poll(), Some(Ok(())));
    });
}

#[test]
fn dropped_and_settled_tokens_end_it_once() {
    ::loom::model(|| {
        let calls = Arc::new(AtomicUsize::new(0));
        let c = calls.clone();
        let comp = Completion::new(move |r| {
            assert_eq!(r, Err(ErrorKind::Canceled));
            c.fetch_add(1, Ordering::Relaxed);
        });
        let tokens = [comp.token(), comp.token()];
        let threads = tokens.map(|token| thread::spawn(move || drop(token)));
        comp.seal();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    });
}
