//! What tests check with: payloads that can be recognised, and a ledger of completions.

use std::sync::Arc;

use parking_lot::Mutex;
use uct::{AmId, Completion, Endpoint, ErrorKind, MemRegion, MemSlice, SendError, md::MemoryDomain};

/// `len` bytes that differ from those of other seeds, and from one another.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 24) as u8
        })
        .collect()
}

/// Registered memory with these bytes.
///
/// # Panics
/// If the domain does not give any.
pub fn region(md: &dyn MemoryDomain, bytes: &[u8]) -> MemRegion {
    let mut r = md.mem_alloc(bytes.len().max(1)).expect("memory");
    r.bytes_mut().expect("no view yet")[..bytes.len()].copy_from_slice(bytes);
    r
}

/// Sends the numbers from `next` on until there is back-pressure; returns how many were accepted. Nothing moves meanwhile.
///
/// # Panics
/// If a send fails.
#[track_caller]
pub fn fill(ep: &dyn Endpoint, id: AmId, next: &mut u64) -> usize {
    let before = *next;
    loop {
        match ep.am_short(id, *next, b"") {
            Ok(()) => *next += 1,
            Err(SendError::NoResource) => return (*next - before) as usize,
            Err(e) => panic!("{e}"),
        }
    }
}

/// Sends zero-copy messages, each with a completion of its own, until there is back-pressure; returns how many were accepted.
///
/// # Panics
/// If a send fails.
#[track_caller]
pub fn fill_zcopy(ep: &dyn Endpoint, id: AmId, iov: &[MemSlice], ledger: &Ledger) -> usize {
    for accepted in 0.. {
        match ep.am_zcopy(id, b"", iov, Some(&ledger.completion())) {
            Ok(_) => {}
            Err(SendError::NoResource) => return accepted,
            Err(e) => panic!("{e}"),
        }
    }
    unreachable!("back-pressure comes first")
}

/// Completions by number, in the order in which they fired. Says that each fires exactly once.
#[derive(Clone, Default)]
pub struct Ledger(Arc<Mutex<Book>>);

#[derive(Default)]
struct Book {
    /// By number: the result, once it is there.
    results: Vec<Option<Result<(), ErrorKind>>>,
    order: Vec<usize>,
}

impl Ledger {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// A completion with the next number. Seal (drop) it after its operations were posted.
    ///
    /// # Panics
    /// In its callback, if it fires twice.
    pub fn completion(&self) -> Completion {
        let book = self.0.clone();
        let n = {
            let mut b = self.0.lock();
            b.results.push(None);
            b.results.len() - 1
        };
        Completion::new(move |r| {
            let mut b = book.lock();
            assert!(b.results[n].is_none(), "completion {n} fired twice");
            b.results[n] = Some(r);
            b.order.push(n);
        })
    }

    /// How many have fired.
    pub fn fired(&self) -> usize {
        self.0.lock().order.len()
    }

    /// How many have not.
    pub fn open(&self) -> usize {
        let b = self.0.lock();
        b.results.len() - b.order.len()
    }

    /// The result of number `n`, if it has fired.
    pub fn result(&self, n: usize) -> Option<Result<(), ErrorKind>> {
        self.0.lock().results[n]
    }

    /// The results, in order of number, of all.
    ///
    /// # Panics
    /// If one has not fired.
    #[track_caller]
    pub fn all(&self) -> Vec<Result<(), ErrorKind>> {
        let b = self.0.lock();
        b.results.iter().enumerate().map(|(i, r)| r.unwrap_or_else(|| panic!("completion {i} never fired"))).collect()
    }

    /// The numbers, in the order in which they fired.
    pub fn order(&self) -> Vec<usize> {
        self.0.lock().order.clone()
    }
}
