//! [`Lendable`]: a queue pair that another thread has to itself for a while, because what is done to it there may sleep.
//!
//! Whoever lends it keeps an [`Away`] in its place. Nothing can be posted to it, polled from it or destroyed under the other
//! thread's feet, for it is not here. An owner who cannot wait [leaves](Away::leave) instead, and the other thread ends it.

use std::{mem, sync::Arc};

use uct::sync::Mutex;

use crate::device::{ResetJob, ResetWaker, VerbsError, VerbsResult};

/// What calls answer that cannot be made while the queue pair is away.
pub(crate) const fn busy(call: &'static str) -> VerbsError {
    VerbsError::new(call, libc::EBUSY)
}

/// A queue pair as its owner has it.
pub(crate) enum Lendable<Q> {
    Here(Q),
    Away(Away<Q>),
    /// See [`Lendable::end`].
    Ended,
}

impl<Q: Send + 'static> Lendable<Q> {
    /// `None` while it is away.
    #[inline]
    pub(crate) fn get(&self) -> Option<&Q> {
        match self {
            Lendable::Here(qp) => Some(qp),
            _ => None,
        }
    }

    /// `None` while it is away.
    #[inline]
    pub(crate) fn get_mut(&mut self) -> Option<&mut Q> {
        match self {
            Lendable::Here(qp) => Some(qp),
            _ => None,
        }
    }

    /// Lends it, see [`Away::lend`]. `None` if it is away.
    pub(crate) fn lend(
        &mut self,
        work: impl FnOnce(&mut Q) -> VerbsResult<()> + Send + 'static,
        wake: ResetWaker,
    ) -> Option<ResetJob> {
        match mem::replace(self, Lendable::Ended) {
            Lendable::Here(qp) => {
                let (away, job) = Away::lend(qp, work, wake);
                *self = Lendable::Away(away);
                Some(job)
            }
            other => {
                *self = other;
                None
            }
        }
    }

    /// Takes it back and says what came of it, once the other thread is done with it.
    pub(crate) fn take_back(&mut self) -> Option<VerbsResult<()>> {
        let Lendable::Away(away) = self else { return None };
        let (qp, result) = away.take()?;
        *self = Lendable::Here(qp);
        Some(result)
    }

    /// Lets `end` have it: here, or where it is, when that is done with it.
    pub(crate) fn end(&mut self, end: impl FnOnce(Q) + Send + 'static) {
        match mem::replace(self, Lendable::Ended) {
            Lendable::Here(qp) => end(qp),
            Lendable::Away(away) => away.leave(end),
            Lendable::Ended => {}
        }
    }
}

/// The owner's end. Dropping it without [`Away::take`] or [`Away::leave`] lets the queue pair be dropped where it is.
pub(crate) struct Away<Q>(Arc<Mutex<Place<Q>>>);

enum Place<Q> {
    /// On its way, or back in its owner's hands.
    Out,
    /// Back, with what came of it.
    Back(Q, VerbsResult<()>),
    /// Its owner is gone: this ends it.
    Left(Box<dyn FnOnce(Q) + Send>),
}

/// The other thread's end, which gives it back by being dropped.
struct Loan<Q> {
    qp: Option<Q>,
    result: VerbsResult<()>,
    place: Arc<Mutex<Place<Q>>>,
    wake: ResetWaker,
}

impl<Q: Send + 'static> Away<Q> {
    /// Lends `qp` to the thread that calls the job, which does `work` with it. `wake` is called when it is back. If the job is
    /// dropped instead, it comes back with `ECANCELED`.
    pub(crate) fn lend(
        qp: Q,
        work: impl FnOnce(&mut Q) -> VerbsResult<()> + Send + 'static,
        wake: ResetWaker,
    ) -> (Away<Q>, ResetJob) {
        let place = Arc::new(Mutex::new(Place::Out));
        let result = Err(VerbsError::new("modify_qp", libc::ECANCELED));
        let mut loan = Loan { qp: Some(qp), result, place: place.clone(), wake };
        let job = move || {
            if let Some(qp) = &mut loan.qp {
                loan.result = work(qp);
            }
            drop(loan);
        };
        (Away(place), Box::new(job))
    }

    /// The queue pair and what came of it, once it is back.
    pub(crate) fn take(&self) -> Option<(Q, VerbsResult<()>)> {
        let mut place = self.0.lock();
        match mem::replace(&mut *place, Place::Out) {
            Place::Back(qp, result) => Some((qp, result)),
            other => {
                *place = other;
                None
            }
        }
    }

    /// Gives it up: `end` gets it, now if it is back, else on the thread that has it, when that is done with it.
    pub(crate) fn leave(self, end: impl FnOnce(Q) + Send + 'static) {
        let mut place = self.0.lock();
        match mem::replace(&mut *place, Place::Out) {
            Place::Back(qp, _) => {
                drop(place);
                end(qp);
            }
            _ => *place = Place::Left(Box::new(end)),
        }
    }
}

impl<Q> Drop for Loan<Q> {
    fn drop(&mut self) {
        let Some(qp) = self.qp.take() else { return };
        let mut place = self.place.lock();
        match mem::replace(&mut *place, Place::Out) {
            Place::Left(end) => {
                // Not under the lock: destroying it may sleep.
                drop(place);
                end(qp);
            }
            _ => {
                *place = Place::Back(qp, self.result);
                drop(place);
            }
        }
        (self.wake)();
    }
}

#[cfg(all(test, not(uct_loom)))]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc::channel,
        },
        thread,
    };

    use super::*;

    fn counting() -> (Arc<AtomicUsize>, ResetWaker) {
        let count = Arc::new(AtomicUsize::new(0));
        let c = count.clone();
        let wake = move || {
            c.fetch_add(1, Ordering::Relaxed);
        };
        (count, Arc::new(wake))
    }

    const EIO: VerbsError = VerbsError::new("modify_qp", libc::EIO);

    #[test]
    fn it_comes_back_once_with_what_was_done() {
        for result in [Ok(()), Err(EIO)] {
            let (woken, wake) = counting();
            let work = move |q: &mut u32| {
                *q += 1;
                result
            };
            let (away, job) = Away::lend(7, work, wake);
            assert!(away.take().is_none());
            assert_eq!(woken.load(Ordering::Relaxed), 0);
            thread::spawn(job).join().unwrap();
            assert_eq!(woken.load(Ordering::Relaxed), 1);
            assert_eq!(away.take(), Some((8, result)));
            assert!(away.take().is_none());
        }
    }

    #[test]
    fn a_job_that_is_dropped_gives_it_back_untouched() {
        let (woken, wake) = counting();
        let (away, job) = Away::lend(7, |_| panic!("nobody called it"), wake);
        drop(job);
        let (qp, result) = away.take().unwrap();
        assert_eq!((qp, result.unwrap_err().errno, woken.load(Ordering::Relaxed)), (7, libc::ECANCELED, 1));
    }

    /// Its owner leaves while the other thread is in the middle of it, and does not wait.
    #[test]
    fn one_whose_owner_left_ends_on_the_thread_that_has_it() {
        let (_, wake) = counting();
        let ((entered, has_entered), (go, may_go), (end, ended)) = (channel(), channel(), channel());
        let work = move |_: &mut u32| {
            entered.send(()).unwrap();
            may_go.recv().unwrap();
            Ok(())
        };
        let (away, job) = Away::lend(7, work, wake);
        let helper = thread::spawn(job);
        has_entered.recv().unwrap();
        away.leave(move |qp| end.send((qp, thread::current().id())).unwrap());
        assert!(ended.try_recv().is_err());
        go.send(()).unwrap();
        assert_eq!(ended.recv(), Ok((7, helper.thread().id())));
        helper.join().unwrap();
    }

    #[test]
    fn one_that_is_back_ends_where_its_owner_leaves() {
        let (_, wake) = counting();
        let (away, job) = Away::lend(7, |_| Ok(()), wake);
        job();
        let ended = Arc::new(AtomicUsize::new(0));
        let e = ended.clone();
        away.leave(move |qp| e.store(qp, Ordering::Relaxed));
        assert_eq!(ended.load(Ordering::Relaxed), 7);
    }
}

#[cfg(all(test, uct_loom))]
mod loom;
