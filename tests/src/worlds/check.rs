//! What must hold: while everything happens (`Run::watch`), when it is over (`Run::calm`), and at the end of a process
//! (`Run::tear_down`).

use std::{sync::Arc, time::Duration};

use ib::sim::Faults;
use uct::{EpParams, ErrorKind, FlushMode, Posted, SendError, Time};

use super::{
    draw::{CONN_SN_LAST, Trouble},
    host::Life,
    line::{Line, What},
    run::{Ending, Run},
};
use crate::world::Motion;

/// The most messages that wait for a user, see `READY_MAX` in `ud/src/live.rs`, and one round more.
const WAITING_MAX: u64 = 4096 + 64;

impl Run {
    // --- who may fail

    /// True if address handles of a host, or to it, may be refused: for some of its processes that was so.
    pub(super) fn handles_in_trouble(&self, host: usize) -> bool {
        self.lives.iter().any(|l| l.host == host && (l.ah_trouble || l.gid_trouble))
    }

    /// Why a line may fail in any world: somebody's user, or a death, has to do with it.
    fn structural_excuse(&self, line: &Line) -> Option<&'static str> {
        let (mine, book) = (&self.lives[line.life], line.book.lock());
        let spoilt = |l: &Line| {
            let b = l.book.lock();
            b.destroyed || b.given_up || b.failed.is_some()
        };
        if !mine.is_alive() || !mine.is_well() {
            return Some("its process is gone");
        }
        if book.given_up {
            return Some("its user has given it up");
        }
        let leaving = self.current[line.to_host].is_none_or(|l| !self.lives[l].is_well());
        if line.doubtful || leaving || self.last_end[line.to_host].is_some_and(|t| t >= line.born) {
            return Some("its peer has gone");
        }
        let sent = book.sent;
        drop(book);
        if line.partner.is_some_and(|p| spoilt(&self.lines[p])) {
            return Some("its other end was given up");
        }
        // The n-th lines of both directions are one connection; which is the n-th nobody outside can say once a process has
        // been followed by another.
        let back = |l: &&Line| {
            l.partner.is_none() && self.lives[l.life].host == line.to_host && l.to_host == mine.host && spoilt(l)
        };
        if line.partner.is_none() && self.lines.iter().filter(back).count() > 0 {
            return Some("a line of the other direction was given up");
        }
        if sent == 0 {
            let crowded = |host: usize| self.plan.hosts[host].passive_max < 1000;
            if self.handles_in_trouble(mine.host) || self.handles_in_trouble(line.to_host) {
                return Some("no address handle");
            }
            if crowded(line.to_host) || self.plan.conn_sn == CONN_SN_LAST {
                return Some("no room");
            }
        }
        None
    }

    /// True if a line may fail in this way.
    fn may_fail(&self, line: &Line, kind: ErrorKind) -> bool {
        if self.structural_excuse(line).is_some() {
            return true;
        }
        self.plan.mortal && matches!(kind, ErrorKind::EndpointTimeout | ErrorKind::NeverAnswered)
    }

    // --- while everything happens

    /// Takes what has arrived and what has failed, and looks whether all is well.
    pub(super) fn watch(&mut self) {
        for life in 0..self.lives.len() {
            self.collect(life);
        }
        let mut wrong = self.ops.lock().take_wrong();
        wrong.extend(self.wire.lock().take_wrong());
        for line in &self.lines {
            wrong.append(&mut line.book.lock().wrong);
        }
        if let Some(first) = wrong.first() {
            self.fail(first);
        }
        for line in &self.lines {
            let failed = line.book.lock().failed.clone();
            if let Some((kind, text)) = failed
                && !self.may_fail(line, kind)
            {
                self.fail(&format!("line {} failed: {text}", line.number));
            }
        }
        for life in 0..self.lives.len() {
            if self.lives[life].is_alive() {
                self.look_at(life);
            }
        }
    }

    fn collect(&mut self, life: usize) {
        let (inbox, failures, late) = {
            let mut d = self.lives[life].desk.lock();
            let kept = d.kept.len();
            let taken = (std::mem::take(&mut d.inbox), std::mem::take(&mut d.failures), d.late_calls);
            drop(d);
            let peak = &mut self.lives[life].kept_peak;
            *peak = (*peak).max(kept);
            taken
        };
        if late > 0 {
            self.fail(&format!(
                "process {life}: {late} calls of handlers after the interface was closed, or the endpoint destroyed"
            ));
        }
        for m in &inbox {
            if let Err(e) = self.ledgers[life].enter(m) {
                self.fail(&format!("process {life}: {e}"));
            }
            let flow = m.data.first_chunk::<8>().map_or(0, |b| (u64::from_ne_bytes(*b) >> 32) as u32);
            let home = *self.flow_home.entry(flow).or_insert(life);
            let to_host = self.lines.get(flow as usize).map(|l| l.to_host);
            if home != life || to_host != Some(self.lives[life].host) {
                self.fail(&format!("process {life} has got messages of flow {flow}, which was process {home}'s"));
            }
        }
        for f in failures {
            let line = &self.lines[f.user_data as usize];
            let mut b = line.book.lock();
            let again = std::mem::replace(&mut b.reported, true);
            b.failed.get_or_insert_with(|| (f.kind, f.error.to_string()));
            drop(b);
            if again {
                self.fail(&format!("line {}: reported again: {}", f.user_data, f.error));
            }
        }
    }

    /// Bounds of a process.
    fn look_at(&self, life: usize) {
        let l = &self.lives[life];
        let (Some(iface), Some(md)) = (&l.iface, &l.md) else { return };
        if !l.device.violations().is_empty() {
            self.fail(&format!("process {life}: {:?}", l.device.violations()));
        }
        let p = &self.plan.hosts[l.host];
        let all = iface.counters();
        let get = |name: &str| all.iter().find(|c| c.name == name).map_or(0, |c| c.value);
        let stats = md.ah_cache().stats();
        let made = self.lines.iter().filter(|x| x.life == life).count() as u64;
        let records = made + get("ep.passive_created");
        // Receive buffers: those for the queue, those that wait for the user or beyond gaps, and those that he keeps.
        let kept = l.kept_peak.max(l.desk.lock().kept.len()) as u64;
        let mut rx_max = u64::from(p.rx_queue) + WAITING_MAX + p.held_max as u64 + kept;
        if let Some(spare) = p.rx_spare {
            rx_max = rx_max.min(u64::from(p.rx_queue + spare));
        }
        // Send buffers: a window for each record, and the queue, in steps of what a pool grows by.
        let tx_used = records * u64::from(p.window) + u64::from(p.tx_queue);
        let tx_max = tx_used.next_multiple_of(1024) + tx_used.next_multiple_of(256);
        // Each record has one handle, and one that is on its way out for each that was replaced.
        let held_max = records + get("ah.re_resolved") + 1;
        let bounds = [
            ("rx.waiting", get("rx.waiting"), WAITING_MAX),
            ("rx.buffers", get("rx.buffers"), rx_max),
            ("tx.buffers", get("tx.buffers"), tx_max),
            ("eps", get("eps"), records),
            ("address handles held", stats.held as u64, held_max),
            ("address handles", stats.live as u64, stats.created - stats.destroyed),
        ];
        if let Some((what, n, max)) = bounds.into_iter().find(|(_, n, max)| n > max) {
            self.fail(&format!("process {life}: {what} {n}, at most {max} by the formula"));
        }
    }

    // --- when it is over

    /// The faults stop. Everything must end within a bound of virtual time.
    pub(super) fn calm(&mut self) {
        self.note("calm".to_string());
        self.net.set_faults(Faults::default());
        let mut later = Vec::new();
        while let Some((_, ending)) = self.endings.pop_first() {
            match ending {
                Ending::Up(_) => later.push(ending),
                _ => self.end(ending),
            }
        }
        self.pass(self.slowest);
        for ending in later {
            if self.rng.below(4) > 0 {
                self.end(ending);
            }
        }
        for life in 0..self.lives.len() {
            self.lives[life].desk.lock().keep = 0;
            self.give_back(life);
            if self.lives[life].is_alive() {
                self.lives[life].motion = Motion::User;
                self.lives[life].jobs_at = Time::ZERO;
            }
        }
        // What is there works.
        for line in self.lines.clone() {
            line.burst(3, true, &mut self.rng);
        }
        let timeout = self.plan.timeout;
        let mut bound = timeout * 3 + Duration::from_secs(10);
        if self.plan.trouble.contains(Trouble::PAIRS) {
            // The destroyed end of a pair takes nothing more, but answers while it lingers.
            bound += self.plan.linger_max();
        }
        self.until("operations end", bound, |r| r.ops.lock().open() == 0);
        self.until("everything is flushed", bound, |r| r.lines.iter().all(|l| r.is_flushed(l)));
        self.until("everything arrives", bound, |r| r.lines.iter().all(|l| r.has_arrived(l)));
        self.check_operations();
        self.check_failed();
        self.be_quiet();
        self.farewell();
        for life in (0..self.lives.len()).filter(|&l| self.lives[l].is_alive()).collect::<Vec<_>>() {
            let crash = self.rng.below(2) == 0;
            self.end_life(life, crash);
        }
        self.watch();
        let left = self.ops.lock().open();
        if left > 0 {
            self.fail(&format!("{left} operations never ended"));
        }
        let leaks = self.net.leaks();
        if !leaks.is_empty() {
            self.fail(&format!("still alive: {leaks:?}"));
        }
    }

    fn until(&mut self, what: &str, bound: Duration, mut done: impl FnMut(&Self) -> bool) {
        let start = self.now();
        let mut spins = 0;
        loop {
            let (events, next) = self.turn();
            if self.turns.is_multiple_of(64) {
                self.watch();
            } else {
                (0..self.lives.len()).for_each(|life| self.collect(life));
            }
            if done(self) {
                self.watch();
                return;
            }
            spins = if events > 0 { spins + 1 } else { 0 };
            if self.now() > start + bound || spins > 200_000 {
                self.fail(&format!("not within {bound:?}: {what}"));
            }
            if events == 0 {
                self.step(next, self.now() + Duration::from_millis(500));
            }
        }
    }

    fn is_flushed(&self, line: &Line) -> bool {
        if line.book.lock().failed.is_some() || line.book.lock().given_up {
            return true;
        }
        if line.book.lock().pending > 0 {
            return false;
        }
        match line.ep() {
            None => true,
            // One that is still connecting answers NoResource; with nothing sent that does not matter.
            Some(ep) => match ep.flush(FlushMode::Local, None) {
                Ok(p) => p == Posted::Done,
                Err(SendError::NoResource) => line.book.lock().sent == 0,
                Err(SendError::Failed(_)) => true,
            },
        }
    }

    /// True if what must arrive of a line has arrived.
    fn has_arrived(&self, line: &Line) -> bool {
        let b = line.book.lock();
        let (sent, promised) = (b.sent, b.promised);
        let (lost, destroyed) = (b.failed.is_some(), b.destroyed);
        drop(b);
        let home = self.flow_home.get(&line.book.lock().flow).copied();
        let got = home.map_or(0, |h| self.ledgers[h].got(line.number as u32));
        if got > sent {
            self.fail(&format!("line {}: {sent} messages were accepted, {got} have arrived", line.number));
        }
        let due = match self.structural_excuse(line) {
            // Without a death at the other end, what was acknowledged arrives.
            Some(_) => promised,
            None if lost || (self.plan.mortal && destroyed) => promised,
            None => sent,
        };
        let end = self.last_end[line.to_host];
        let receiver_gone =
            line.doubtful || end.is_some_and(|t| t >= line.born) || self.current[line.to_host].is_none();
        receiver_gone || got >= due
    }

    fn check_operations(&self) {
        let ended: Vec<_> = self.ops.lock().ended().collect();
        for (line, what, result) in ended {
            let (line, Err(kind)) = (&self.lines[line], result) else { continue };
            let b = line.book.lock();
            let (ended, failed) = (b.destroyed || b.given_up, b.failed.is_some());
            drop(b);
            let ended = ended || !self.lives[line.life].is_alive() || !self.lives[line.life].is_well();
            let ok = match kind {
                ErrorKind::Canceled | ErrorKind::Closed => ended,
                // A destroyed endpoint that fails tells it by what was left of it only: a close.
                _ => failed || (ended && (what == What::Close || self.may_fail(line, kind))),
            };
            if !ok || (!self.may_fail(line, kind) && !ended) {
                self.fail(&format!("line {}: {what:?} ended with {kind:?}", line.number));
            }
        }
    }

    /// What has failed says so to whoever asks, also if requests are queued: `NoResource` would be a promise.
    fn check_failed(&self) {
        for line in &self.lines {
            let b = line.book.lock();
            let (reported, given_up) = (b.reported, b.given_up);
            drop(b);
            if let Some(ep) = line.ep().filter(|_| reported && !given_up)
                && !matches!(ep.flush(FlushMode::Local, None), Err(SendError::Failed(_)))
            {
                self.fail(&format!("line {} has failed, and does not say so", line.number));
            }
        }
    }

    /// Who has nothing to do has no timer.
    fn be_quiet(&mut self) {
        let longest = self.plan.linger_max() + self.plan.timeout * 3 + Duration::from_secs(2);
        let end = self.now() + longest;
        self.pass(longest);
        debug_assert!(self.now() >= end);
        self.watch();
        for life in 0..self.lives.len() {
            let l = &self.lives[life];
            let (Some(worker), Some(md)) = (&l.worker, &l.md) else { continue };
            let own = self.lines.iter().filter(|x| x.life == life && x.is_open()).count() as u64;
            // Beyond the users' own there are those that strangers have made, which are looked after.
            if l.counter("eps") == own
                && let Some(t) = worker.next_timeout()
            {
                self.fail(&format!("process {life} has nothing to do, and a timer at {t:?}"));
            }
            // Handles that may have to go some day are looked after: with a time to live, or more of them than may be idle.
            let p = &self.plan.hosts[l.host];
            let stats = md.ah_cache().stats();
            let looked_after = stats.live > 0 && (p.ttl != Duration::MAX && !p.ttl.is_zero());
            let t = md.ah_cache().poll(uct::Clock::now(&*l.clock));
            if stats.idle > p.idle_max as usize {
                self.fail(&format!("process {life}: {} idle address handles, at most {}", stats.idle, p.idle_max));
            }
            if let Some(t) = t
                && !looked_after
                && stats.live <= p.idle_max as usize
            {
                self.fail(&format!("process {life}: its cache has nothing to do, and a timer at {t:?}"));
            }
        }
    }

    /// Users give everything up; records, buffers and handles go home.
    fn farewell(&mut self) {
        for line in self.lines.clone() {
            match self.rng.below(2) {
                0 => line.destroy(false),
                _ => line.close(),
            }
        }
        let (linger, timeout) = (self.plan.linger_max(), self.plan.timeout);
        // A peer that has forgotten is asked in vain for the time-out; unclaimed records wait for two sweeps before.
        let bound = linger + linger.max(timeout) * 3 + timeout * 3 + Duration::from_secs(10);
        self.until("records are freed", bound, |r| r.lives.iter().all(|l| l.counter("eps") == 0));
        self.until("operations end", Duration::from_secs(1), |r| r.ops.lock().open() == 0);
        self.until("nobody has a timer", Duration::from_secs(5), |r| {
            r.lives.iter().all(|l| l.worker.as_ref().is_none_or(|w| w.next_timeout().is_none()))
        });
        if !self.lives.iter().all(is_home) {
            self.stir(bound);
        }
        let in_use = self.ops.lock().regions_in_use();
        if in_use > 0 {
            self.fail(&format!("{in_use} memory regions of users are still in use"));
        }
    }

    /// What a failed endpoint has left in a queue whose last send asked for no report waits for the next send that does: so
    /// everybody says something to somebody, and then it must be home.
    fn stir(&mut self, bound: Duration) {
        let living: Vec<usize> = (0..self.lives.len()).filter(|&l| self.lives[l].is_alive()).collect();
        let first = self.lines.len();
        for (i, &life) in living.iter().enumerate() {
            let to = living[(i + 1) % living.len()];
            let (device, iface) = self.lives[to].address.clone();
            if to == life || self.new_line(life, to, &EpParams::to_iface(&device, &iface)).is_none() {
                return;
            }
        }
        if self.plan.conn_sn == CONN_SN_LAST {
            return;
        }
        self.until("a last word is sent", self.plan.timeout * 2, |r| {
            let mut rng = r.rng.clone();
            r.lines[first..].iter().for_each(|l| {
                if l.book.lock().sent == 0 {
                    l.burst(1, false, &mut rng)
                }
            });
            r.lines[first..].iter().all(|l| l.book.lock().sent > 0 && r.is_flushed(l))
        });
        for line in &self.lines[first..] {
            line.close();
        }
        self.until("records are freed again", bound, |r| r.lives.iter().all(|l| l.counter("eps") == 0));
        self.until("buffers and handles come home", Duration::from_secs(5), |r| r.lives.iter().all(is_home));
    }

    // --- the end of a process

    /// Takes a process apart, in some order, and looks whether anything is left.
    pub(super) fn tear_down(&mut self, life: usize) {
        let lines: Vec<Line> = self.lines.iter().filter(|l| l.life == life).cloned().collect();
        let order = self.rng.below(4);
        let destroy = |close: bool| {
            for line in &lines {
                if close { line.close() } else { line.destroy(false) }
            }
        };
        let desk = self.lives[life].desk.clone();
        let forget = || {
            let (tasks, kept) = {
                let mut d = desk.lock();
                (std::mem::take(&mut d.tasks), std::mem::take(&mut d.kept))
            };
            drop((tasks, kept));
        };
        if order < 2 {
            destroy(order == 0);
        }
        if order == 2 {
            forget();
        }
        let iface = self.lives[life].iface.take();
        drop(iface);
        // Tasks may hold the interface.
        let tasks = std::mem::take(&mut desk.lock().tasks);
        drop(tasks);
        let open: usize = lines.iter().map(|l| self.ops.lock().open_on(l.number)).sum();
        if open > 0 {
            self.fail(&format!("process {life}: {open} operations were open when its interface was closed"));
        }
        desk.lock().closed = true;
        if order == 3 {
            self.lives[life].worker = None;
        }
        destroy(false);
        self.ops.lock().drop_regions(|l| lines.iter().any(|x| x.number == l));
        forget();
        self.collect(life);
        self.lives[life].worker = None;
        let Some(md) = self.lives[life].md.take() else { return };
        md.ah_cache().close();
        for _ in 0..10 {
            md.ah_cache().run_jobs();
            let _next = md.ah_cache().poll(uct::Clock::now(&*self.lives[life].clock));
        }
        let s = md.ah_cache().stats();
        if s.created != s.destroyed || s.held != 0 || s.live != 0 {
            self.fail(&format!("process {life}: {s:?}"));
        }
        if Arc::strong_count(&md) > 1 {
            self.fail(&format!("process {life}: something keeps its domain"));
        }
        drop(md);
        let device = &self.lives[life].device;
        if !device.violations().is_empty() || !device.live().is_zero() {
            self.fail(&format!("process {life}: {:?}, alive: {:?}", device.violations(), device.live()));
        }
    }

    // --- failure

    /// Ends the test with everything that helps to find out why.
    pub(super) fn fail(&self, why: &str) -> ! {
        let mut text = format!("{why}\n");
        for (i, l) in self.lives.iter().enumerate() {
            text += &format!("process {i} on host {}, began {:?}, ended {:?}", l.host, l.began, l.ended);
            if let Some(iface) = &l.iface {
                let all = iface.counters();
                let some: Vec<String> =
                    all.iter().filter(|c| c.value != 0).map(|c| format!("{} {}", c.name, c.value)).collect();
                text += &format!(", next timer {:?}: {}", iface.next_timeout(), some.join(", "));
            }
            text += "\n";
        }
        for l in &self.lines {
            let b = l.book.lock();
            let got = self.flow_home.get(&b.flow).map_or(0, |&h| self.ledgers[h].got(b.flow));
            text += &format!(
                "line {} of process {} to host {} (process {}): open {}, {} sent, {} promised, {got} arrived, {} queued, \
                 destroyed {}, given up {}, failed {:?}, flushed {:?}; operations open {}\n",
                l.number,
                l.life,
                l.to_host,
                l.to_life,
                l.is_open(),
                b.sent,
                b.promised,
                b.pending,
                b.destroyed,
                b.given_up,
                b.failed.as_ref().map(|f| f.0),
                l.slot.try_lock().and_then(|s| s.as_ref().map(|e| e.flush(FlushMode::Local, None))),
                self.ops.lock().open_on(l.number)
            );
        }
        panic!("{text}{}\nat {:?}: {why}", self.net.report(), self.now());
    }
}

/// Send and receive buffers are where they belong, and nobody holds an address handle.
fn is_home(l: &Life) -> bool {
    l.counter("tx.buffers") == l.counter("tx.buffers_free")
        && l.counter("rx.buffers") == l.counter("rx.buffers_free") + l.counter("rx.buffers_posted")
        && l.counter("rx.waiting") == 0
        && l.md.as_ref().is_none_or(|m| m.ah_cache().stats().held == 0)
}
