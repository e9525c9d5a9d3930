//! [`AhCache`]: the door to the cache.

use std::{collections::BTreeMap, fmt, sync::Arc as StdArc};

use uct::{Clock, Result, Time};

use super::{
    AhCacheConfig, AhCacheStats, AhPath, AhRef, AhWaker, Executor, GetOptions, Grade, Invalidated, PathHook, PathNews,
    PendingAh, TryGet,
    errands::Errand,
    shared::{Ask, Miss, Shared},
};
use crate::{
    device::{AhAttr, AsyncEvent, Device, GidEntry, VerbsResult},
    sync::{Arc, Condvar, Mutex, Ordering},
};

/// The address handles of one memory domain. Cloning it makes another handle to the same cache; the last one closes it.
///
/// All methods may be called from any thread. [`AhCache::try_get`] never sleeps; with [`Executor::Threads`] everything
/// that may sleep happens in threads of the cache, with [`Executor::Manual`] in [`AhCache::run_jobs`] and
/// [`AhCache::poll`].
///
/// ```
/// # use std::sync::Arc;
/// # use ib::{ah::{AhCache, AhCacheConfig, GetOptions, TryGet}, device::{AhAttr, Device}};
/// fn connect<D: Device>(cache: &AhCache<D>, peer: &AhAttr) {
///     match cache.try_get(peer, GetOptions::local("ud endpoint")) {
///         TryGet::Ready(ah) => println!("{} is handle number {}", ah.attr(), ah.generation()),
///         TryGet::Pending(_token) => println!("later: keep the token, and give a waker with the options"),
///         TryGet::Failed { error, retry_after } => println!("{error}; again in {retry_after:?}"),
///     }
/// }
/// ```
pub struct AhCache<D: Device> {
    /// The same as the handle's, one step nearer.
    shared: Arc<Shared<D>>,
    handle: Arc<Handle<D>>,
}

/// Closes the cache when the last [`AhCache`] is gone; entries keep [`Shared`] for longer.
struct Handle<D: Device> {
    shared: Arc<Shared<D>>,
}

impl<D: Device> Drop for Handle<D> {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl<D: Device> Clone for AhCache<D> {
    fn clone(&self) -> Self {
        AhCache { shared: Arc::clone(&self.shared), handle: Arc::clone(&self.handle) }
    }
}

impl<D: Device> AhCache<D> {
    /// An empty cache over `device`. Reads the device's attributes and GID tables, which may sleep.
    pub fn new(device: StdArc<D>, cfg: AhCacheConfig, clock: StdArc<dyn Clock>) -> Self {
        let shared = Arc::new(Shared::new(device, cfg, clock));
        AhCache { handle: Arc::new(Handle { shared: Arc::clone(&shared) }), shared }
    }

    /// The device.
    pub fn device(&self) -> &StdArc<D> {
        &self.shared.device
    }

    /// The settings.
    pub fn config(&self) -> &AhCacheConfig {
        &self.shared.cfg
    }

    /// A reference to the address handle for `attr`: the one in force if there is one, else a new one.
    ///
    /// Never sleeps: on devices whose creations do ([`DeviceAttr::ah_create_sleeps`](crate::device::DeviceAttr)) a new one
    /// is `Pending` first. On the others it is created before this returns, and `Pending` means that another thread is
    /// just doing that. A creation that failed a moment ago fails again without asking the device.
    ///
    /// A hit takes some 20 ns. At a finite TTL, reviving an idle entry reads the clock; no other hit does.
    #[inline]
    pub fn try_get(&self, attr: &AhAttr, options: GetOptions<'_>) -> TryGet<D> {
        let shared = &self.shared;
        let hash = shared.hasher.hash(attr);
        if let Some(ah) = shared.hit(hash, attr, options.usage) {
            return TryGet::Ready(ah);
        }
        let GetOptions { usage, origin, waker } = options;
        match Shared::get(shared, Ask { attr, hash, usage, origin, waker }) {
            Miss::Over(outcome) => outcome.into(),
            Miss::Wait(ticket, generation) => TryGet::Pending(PendingAh { ticket, generation }),
        }
    }

    /// Like [`AhCache::try_get`], but waits for a pending creation. Not for the progress path. With [`Executor::Manual`]
    /// this thread runs the queued creations.
    ///
    /// # Errors
    /// Why the handle could not be created; `Closed` after [`AhCache::close`].
    pub fn get(&self, attr: &AhAttr, usage: &'static str) -> Result<AhRef<D>> {
        let bell = StdArc::new((Mutex::new(false), Condvar::new()));
        let ring = StdArc::clone(&bell);
        let waker: AhWaker = StdArc::new(move || {
            *ring.0.lock() = true;
            ring.1.notify_one();
        });
        let mut answer = self.try_get(attr, GetOptions::local(usage).waking(&waker));
        loop {
            match answer {
                TryGet::Ready(ah) => return Ok(ah),
                TryGet::Failed { error, .. } => return Err(error),
                TryGet::Pending(token) => {
                    if self.config().executor == Executor::Manual {
                        self.run_jobs();
                    }
                    wait(&bell);
                    answer = token.take();
                }
            }
        }
    }

    /// Tells the cache what has happened; the [module's](super) table says what that does. Never sleeps: for
    /// [`AsyncEvent::GidChange`] and [`AsyncEvent::PortActive`] the port's GID table is read as by
    /// [`AhCache::refresh_gids`], and what that changes is not in the answer if it is not known yet.
    pub fn handle_event(&self, event: &AsyncEvent) -> Invalidated {
        Shared::handle_event(&self.shared, event)
    }

    /// Reads the GID table of a port and acts as for [`AsyncEvent::GidChange`]; `then` is called afterwards. On devices whose
    /// calls may sleep that happens in the domain's thread (with [`Executor::Manual`] in [`AhCache::run_jobs`] or
    /// [`AhCache::poll`]), else before this returns. Requests that come together share one reading that begins after the last.
    /// If the cache is closed first, `then` is dropped.
    pub fn refresh_gids(&self, port: u8, then: Option<AhWaker>) {
        Shared::refresh_gids(&self.shared, port, then);
    }

    /// The GID table of a port as it was last read; `None` if that failed or there is no such port. No system call.
    pub fn gids(&self, port: u8) -> Option<Vec<GidEntry>> {
        self.shared.state.lock().gids.get(&port)?.clone()
    }

    /// How many GID tables have been read in the background, see [`AhCache::refresh_gids`]: when this has changed, references
    /// may have been poisoned since.
    pub fn tables_read(&self) -> u64 {
        self.shared.tables_read.load(Ordering::Acquire)
    }

    /// True if calls of the device may sleep, so that nothing on a progress path may make them.
    pub fn defers(&self) -> bool {
        self.shared.queued
    }

    /// Runs `errand` where calls of the device may sleep: in the domain's thread, or with [`Executor::Manual`] in
    /// [`AhCache::run_jobs`] and [`AhCache::poll`]. In order, and after this has returned. If the cache is closed first, it is
    /// dropped.
    pub fn run_errand(&self, errand: Box<dyn FnOnce() + Send>) {
        Shared::send_errand(&self.shared, Errand::Run(errand));
    }

    /// The part of [`AsyncEvent::GidChange`] after reading the table, for callers that have read it already. Entries whose
    /// local GID is where it was stay; the others are poisoned. An error counts as a change of everything.
    pub fn handle_gids(&self, port: u8, table: VerbsResult<Vec<GidEntry>>) -> Invalidated {
        self.shared.handle_gids(port, table)
    }

    /// Marks the handle `generation` of `attr` and no other: news about a handle that was replaced meanwhile do not hurt
    /// its successor. True if that changed anything.
    pub fn invalidate(&self, attr: &AhAttr, generation: u64, grade: Grade) -> bool {
        self.shared.invalidate_one(attr, generation, grade)
    }

    /// Tells that resends through `ah` stay unanswered: it becomes stale, so that the next get resolves anew. True if it
    /// was not known yet.
    pub fn report_unresponsive(&self, ah: &AhRef<D>) -> bool {
        self.invalidate(ah.attr(), ah.generation(), Grade::Stale)
    }

    /// The paths that handles, creations and failures of this cache take, sorted: what a watcher of routes and neighbours
    /// has to watch. Takes time in proportion to the cache.
    pub fn paths(&self) -> Vec<AhPath> {
        self.shared.paths()
    }

    /// From now on `hook` is told of the path of each creation before the device is asked, so that who watches routes and
    /// neighbours can be sure to know a path before there is a handle for it. It is called in the thread that creates,
    /// with no lock held, and must not block. There is one hook; later ones are ignored, and the result says so.
    pub fn on_creation(&self, hook: PathHook) -> bool {
        self.shared.creation_hook.set(hook).is_ok()
    }

    /// Tells what has become of paths; [`PathNews`] says what that does. Takes time in proportion to the cache.
    pub fn handle_paths(&self, news: &BTreeMap<AhPath, PathNews>) -> Invalidated {
        self.shared.handle_paths(news)
    }

    /// Runs errands and queued creations in this thread until there are none, and returns how many. For [`Executor::Manual`].
    /// May sleep if the device does.
    pub fn run_jobs(&self) -> usize {
        Shared::run_jobs(&self.shared)
    }

    /// Destroys handles that nobody refers to any more, and idle entries that are too old or too many at `now`. Returns
    /// when to call it next, `None` if not before something else happens. For [`Executor::Manual`]; with threads it does no
    /// harm. May sleep if the device does.
    pub fn poll(&self, now: Time) -> Option<Time> {
        self.shared.poll(now)
    }

    /// A snapshot of the counters. Takes time in proportion to the cache.
    pub fn stats(&self) -> AhCacheStats {
        self.shared.stats()
    }

    /// Gives up the cache's own references and refuses gets from now on. Handles that somebody holds stay valid until
    /// their last reference is dropped; one warning says how many those are and who had them. Pending creations end with
    /// `Closed`. Never blocks: idle handles are destroyed by the domain's thread or the next [`AhCache::poll`]. Closing
    /// twice does nothing.
    pub fn close(&self) {
        self.shared.close();
    }
}

/// Waits until the bell has rung, and silences it.
#[cfg(not(uct_loom))]
fn wait(bell: &(Mutex<bool>, Condvar)) {
    let mut rung = bell.0.lock();
    while !*rung {
        bell.1.wait(&mut rung);
    }
    *rung = false;
}

#[cfg(uct_loom)]
fn wait(bell: &(Mutex<bool>, Condvar)) {
    let mut rung = Some(bell.0.lock());
    while rung.as_deref() == Some(&false) {
        bell.1.wait(&mut rung);
    }
}

impl<D: Device> fmt::Debug for AhCache<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AhCache").field("config", self.config()).field("stats", &self.stats()).finish()
    }
}
