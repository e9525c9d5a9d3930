//! The handler table, changed by the user while the progress thread delivers, in every interleaving. `ci/test --only loom`
//! runs it.
//!
//! Seen to fail: with the generation read after the table in `HandlerView::new`, a handler that was replaced is called for
//! ever; with the generation counted up before the table is changed, outside its lock, likewise.

use std::sync::Arc;

use ::loom::thread;

use super::*;

fn handler() -> AmHandler {
    Arc::new(|_| {})
}

fn is_in(view: &HandlerView, id: usize, handler: &AmHandler) -> bool {
    view.table()[id].as_ref().is_some_and(|(h, _)| Arc::ptr_eq(h, handler))
}

#[test]
fn a_view_ends_with_the_last_table() {
    ::loom::model(|| {
        let table = Arc::new(HandlerTable::new());
        let (old, new) = (handler(), handler());
        let id = AmId::truncate(5);
        drop(table.set(id, Some((old.clone(), HandlerKind::Async))));
        let mut view = HandlerView::new(&table);
        let user = {
            let (table, new) = (table.clone(), new.clone());
            thread::spawn(move || {
                drop(table.set(AmId::truncate(6), None));
                drop(table.set(id, Some((new, HandlerKind::Async))));
            })
        };
        for _ in 0..2 {
            drop(view.refresh(&table));
            assert!(is_in(&view, 5, &old) || is_in(&view, 5, &new), "a message finds no handler");
        }
        user.join().unwrap();
        drop(view.refresh(&table));
        assert!(is_in(&view, 5, &new), "the view stays with the handler that was replaced");
        assert!(view.refresh(&table).is_none(), "there is nothing newer");
    });
}

#[test]
fn nothing_of_a_cleared_table_is_left() {
    ::loom::model(|| {
        let table = Arc::new(HandlerTable::new());
        let h = handler();
        drop(table.set(AmId::truncate(1), Some((h.clone(), HandlerKind::Sync))));
        let closing = {
            let table = table.clone();
            thread::spawn(move || drop(table.clear()))
        };
        let mut view = HandlerView::new(&table);
        drop(view.refresh(&table));
        closing.join().unwrap();
        drop(view.refresh(&table));
        assert!(view.table().iter().all(Option::is_none));
        assert_eq!(Arc::strong_count(&h), 1, "the user's handler is kept");
    });
}
