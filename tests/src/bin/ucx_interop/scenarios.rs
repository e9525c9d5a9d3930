//! What is played. Each scenario has a UCX process and an interface of its own.

use super::{
    ours::{FORMS, Ours},
    ucx::{Ucx, network, recreate_rxe},
};

type Outcome = Result<String, String>;

/// A scenario gets the UCX program, and may have something to say.
type Scenario = fn(&str) -> Outcome;

/// Every scenario, by name.
pub(crate) const ALL: &[(&str, Scenario)] = &[
    ("we connect, UCX takes the connection over", we_connect),
    ("UCX connects, we take the connection over", ucx_connects),
    ("endpoints connected by address", by_address),
    ("eight connects cross on a slow network", |p| crossing(p, &["delay", "30ms"])),
    ("eight connects cross, a tenth lost", |p| crossing(p, &["loss", "10%", "delay", "2ms"])),
    ("short, bcopy and zcopy of many sizes", sizes),
    ("both ways on four endpoints, 5% lost", |p| both_ways(p, &["loss", "5%"])),
    ("both ways on four endpoints, reordered and doubled", |p| {
        both_ways(p, &["delay", "3ms", "2ms", "reorder", "30%", "50%", "duplicate", "10%"])
    }),
    ("UCX destroys first, we go on sending", ucx_destroys),
    ("UCX destroys first, 10% lost", |p| network(&["loss", "10%"]).and_then(|()| ucx_destroys(p))),
    ("we destroy first, UCX goes on sending", we_destroy),
    ("we destroy first, 10% lost", |p| network(&["loss", "10%"]).and_then(|()| we_destroy(p))),
    ("UCX connects and destroys at once", ucx_changes_its_mind),
    ("we connect and destroy at once", we_change_our_mind),
    ("ten connections, one after the other, destroyed by both at once, 5% lost", |p| {
        network(&["loss", "5%"]).and_then(|()| one_after_the_other(p))
    }),
    ("UCX crashes and comes back with the same queue pair", ucx_restarts),
    ("UCX ends and comes back with the same queue pair", ucx_ends_and_restarts),
    ("we come back with another queue pair", |p| we_restart(p, SEED + 1)),
    ("we come back with the same queue pair", |p| we_restart(p, SEED)),
];

/// One seed for all: what is random in a device is its queue pair numbers.
const SEED: u64 = 77;

fn pair(program: &str) -> Result<(Ours, Ucx), String> {
    let mut ours = Ours::open(SEED)?;
    let ucx = Ucx::start(program, &mut ours)?;
    Ok((ours, ucx))
}

/// Each form in turn, `count` messages each, both ways on endpoint `n` of both sides, checked and flushed.
fn exchange(ours: &mut Ours, ucx: &mut Ucx, n: u32, count: u32) -> Result<(), String> {
    queue(ours, ucx, n, count)?;
    settle(ours, ucx, n)
}

fn queue(ours: &mut Ours, ucx: &mut Ucx, n: u32, count: u32) -> Result<(), String> {
    for form in FORMS {
        let size = if form == "short" { 40 } else { 700 };
        ours.send(n, form, size, count);
        ucx.send(ours, n, form, size, count)?;
    }
    Ok(())
}

/// Waits until everything that was queued on `n` has arrived, and is acknowledged.
fn settle(ours: &mut Ours, ucx: &mut Ucx, n: u32) -> Result<(), String> {
    ours.flush()?;
    let (sent, theirs) = (ours.sent.get(&n).copied().unwrap_or(0), ucx.sent[n as usize]);
    ucx.ask(ours, &format!("flush {n}"))?;
    ours.wait(n, theirs)?;
    ucx.ask(ours, &format!("wait {n} {sent}"))?;
    Ok(())
}

fn end(mut ours: Ours, ucx: Ucx) -> Outcome {
    ucx.quit(&mut ours)?;
    ours.step()?;
    if let Some(f) = ours.failures().first() {
        return Err(format!("ours: an endpoint failed: {}", f.error));
    }
    Ok(match ours.counter("tx.resends") {
        0 => String::new(),
        n => format!("packets sent again: {n}"),
    })
}

/// Connects endpoint `n` on UCX's side.
fn ucx_to(ours: &mut Ours, ucx: &mut Ucx, n: u32) -> Result<(), String> {
    let to = format!("to {n} {}", ours.address());
    ucx.ask(ours, &to).map(|_| ())
}

fn we_connect(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    ours.to(0, &ucx.device, &ucx.iface)?;
    ours.send(0, "bcopy", 100, 50);
    ours.flush()?;
    ucx.ask(&mut ours, "wait 0 50")?;
    // Its first endpoint to us is the one that we asked for: no request goes back.
    ucx_to(&mut ours, &mut ucx, 0)?;
    exchange(&mut ours, &mut ucx, 0, 50)?;
    end(ours, ucx)
}

fn ucx_connects(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    ucx_to(&mut ours, &mut ucx, 0)?;
    ucx.send(&mut ours, 0, "bcopy", 100, 50)?;
    ours.wait(0, 50)?;
    let (device, iface) = (ucx.device.clone(), ucx.iface.clone());
    ours.to(0, &device, &iface)?;
    exchange(&mut ours, &mut ucx, 0, 50)?;
    end(ours, ucx)
}

fn by_address(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    for n in 0..3 {
        let mine = ours.ep(n)?;
        let theirs = ucx.ask(&mut ours, &format!("ep {n}"))?;
        let join = format!("join {n} {} {mine}", ours.device());
        ucx.ask(&mut ours, &join)?;
        if n == 1 {
            // Sent before we are joined: UCX's first window is delivered, and not acknowledged.
            ucx.send(&mut ours, n, "bcopy", 64, 10)?;
            ours.until("an early message", |o| o.has_arrived(n) > 0)?;
        }
        ours.join(n, &ucx.device, &theirs)?;
        exchange(&mut ours, &mut ucx, n, 30)?;
    }
    end(ours, ucx)
}

fn crossing(program: &str, faults: &[&str]) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    network(faults)?;
    for n in 0..8 {
        let to = format!("to {n} {}", ours.address());
        // Its request leaves while ours does.
        ucx.tell(&to)?;
        ours.to(n, &ucx.device, &ucx.iface)?;
        ours.send(n, "bcopy", 200, 20);
        ucx.answer(&mut ours, &to)?;
        ucx.send(&mut ours, n, "bcopy", 200, 20)?;
    }
    for n in 0..8 {
        settle(&mut ours, &mut ucx, n)?;
    }
    for n in 0..8 {
        exchange(&mut ours, &mut ucx, n, 5)?;
    }
    end(ours, ucx)
}

fn sizes(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    ours.to(0, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 0)?;
    for form in FORMS {
        let all: &[u32] = if form == "short" { &[8, 9, 15, 40, 48] } else { &[8, 9, 100, 1001, 2048, 4000, 4088] };
        for &size in all {
            ours.send(0, form, size, 10);
            ucx.send(&mut ours, 0, form, size, 10)?;
            // UCX's program has room for eight jobs.
            settle(&mut ours, &mut ucx, 0)?;
        }
    }
    end(ours, ucx)
}

fn both_ways(program: &str, faults: &[&str]) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    network(faults)?;
    for n in 0..4 {
        ours.to(n, &ucx.device, &ucx.iface)?;
        ucx_to(&mut ours, &mut ucx, n)?;
    }
    for _ in 0..2 {
        for n in 0..4 {
            queue(&mut ours, &mut ucx, n, 60)?;
        }
        for n in 0..4 {
            settle(&mut ours, &mut ucx, n)?;
        }
    }
    end(ours, ucx)
}

fn ucx_destroys(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    ours.to(0, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 0)?;
    exchange(&mut ours, &mut ucx, 0, 20)?;
    ucx.ask(&mut ours, "destroy 0")?;
    // A destroyed endpoint of UCX still receives, and acknowledges, as long as it lingers.
    ours.send(0, "bcopy", 100, 100);
    ours.flush()?;
    let sent = ours.sent[&0];
    ucx.ask(&mut ours, &format!("wait 0 {sent}"))?;
    ours.destroy(0);
    // The next connection of the same two.
    ours.to(1, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 1)?;
    exchange(&mut ours, &mut ucx, 1, 20)?;
    end(ours, ucx)
}

fn we_destroy(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    ours.to(0, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 0)?;
    exchange(&mut ours, &mut ucx, 0, 20)?;
    ours.send(0, "bcopy", 100, 100);
    ours.until("room for sending", |o| o.is_sent())?;
    // Without a flush: what was accepted is delivered all the same.
    ours.destroy(0);
    let sent = ours.sent[&0];
    ucx.ask(&mut ours, &format!("wait 0 {sent}"))?;
    // And what UCX sends to the destroyed endpoint is acknowledged.
    ucx.send(&mut ours, 0, "bcopy", 100, 50)?;
    ucx.ask(&mut ours, "flush 0")?;
    ucx.ask(&mut ours, "destroy 0")?;
    ucx_to(&mut ours, &mut ucx, 1)?;
    ours.to(1, &ucx.device, &ucx.iface)?;
    exchange(&mut ours, &mut ucx, 1, 20)?;
    end(ours, ucx)
}

fn ucx_changes_its_mind(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    ucx_to(&mut ours, &mut ucx, 0)?;
    ucx.ask(&mut ours, "destroy 0")?;
    // Our first connection is the one that UCX gave up; its endpoint lingers, and takes what comes.
    ours.to(0, &ucx.device, &ucx.iface)?;
    ours.send(0, "bcopy", 100, 30);
    ours.flush()?;
    ucx.ask(&mut ours, "wait 0 30")?;
    ours.to(1, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 1)?;
    exchange(&mut ours, &mut ucx, 1, 20)?;
    end(ours, ucx)
}

fn we_change_our_mind(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    ours.to(0, &ucx.device, &ucx.iface)?;
    ours.destroy(0);
    ucx_to(&mut ours, &mut ucx, 0)?;
    ucx.send(&mut ours, 0, "bcopy", 100, 30)?;
    ucx.ask(&mut ours, "flush 0")?;
    ours.to(1, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 1)?;
    exchange(&mut ours, &mut ucx, 1, 20)?;
    end(ours, ucx)
}

fn one_after_the_other(program: &str) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    for n in 0..10 {
        let to = format!("to {n} {}", ours.address());
        ucx.tell(&to)?;
        ours.to(n, &ucx.device, &ucx.iface)?;
        ucx.answer(&mut ours, &to)?;
        exchange(&mut ours, &mut ucx, n, 5)?;
        let destroy = format!("destroy {n}");
        ucx.tell(&destroy)?;
        ours.destroy(n);
        ucx.answer(&mut ours, &destroy)?;
    }
    end(ours, ucx)
}

/// A UCX process with the same address and queue pair number as `before`.
fn again(program: &str, ours: &mut Ours, before: &(String, String)) -> Result<Ucx, String> {
    recreate_rxe()?;
    let ucx = Ucx::start(program, ours)?;
    if (&ucx.device, &ucx.iface) != (&before.0, &before.1) {
        return Err(format!(
            "UCX came back as {} {}, it was {} {}: the scenario is not played",
            ucx.device, ucx.iface, before.0, before.1
        ));
    }
    Ok(ucx)
}

/// Both connections of a scenario that restarts UCX, the first of which was `n`.
fn reconnect(ours: &mut Ours, ucx: &mut Ucx, n: u32) -> Result<(), String> {
    // Its request has everything in common with the one before the restart but the process it names.
    ucx_to(ours, ucx, n)?;
    ucx.send(ours, n, "bcopy", 100, 20)?;
    ours.wait(n, 20)?;
    ours.to(n, &ucx.device, &ucx.iface)?;
    exchange(ours, ucx, n, 20)
}

fn ucx_restarts(program: &str) -> Outcome {
    recreate_rxe()?;
    let (mut ours, mut ucx) = pair(program)?;
    let address = (ucx.device.clone(), ucx.iface.clone());
    ours.to(0, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 0)?;
    exchange(&mut ours, &mut ucx, 0, 20)?;
    // In the middle of a stream to it.
    ours.send(0, "bcopy", 100, 10);
    ours.until("room for sending", |o| o.is_sent())?;
    ucx.kill()?;
    let mut ucx = again(program, &mut ours, &address)?;
    ours.restart_stream(0);
    reconnect(&mut ours, &mut ucx, 0)?;
    let told = ours.failures();
    match &told[..] {
        [f] if f.kind == uct::ErrorKind::ConnectionReset => {}
        _ => return Err(format!("ours: the old endpoint's failure was to be told once, as a reset: {told:?}")),
    }
    end(ours, ucx)
}

fn ucx_ends_and_restarts(program: &str) -> Outcome {
    recreate_rxe()?;
    let (mut ours, mut ucx) = pair(program)?;
    let address = (ucx.device.clone(), ucx.iface.clone());
    ours.to(0, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 0)?;
    exchange(&mut ours, &mut ucx, 0, 20)?;
    // Both sides destroy; ours lingers, and knows the connection still.
    ours.destroy(0);
    ucx.quit(&mut ours)?;
    let mut ucx = again(program, &mut ours, &address)?;
    ours.restart_stream(0);
    reconnect(&mut ours, &mut ucx, 0)?;
    end(ours, ucx)
}

/// The first release of UCX that is known to follow a peer which comes back with its queue pair number. An earlier one, 1.13
/// for certain, aborts when it is asked by another endpoint of what it takes for the same connection.
const FOLLOWS_RESTARTS: (u32, u32) = (1, 23);

fn we_restart(program: &str, seed: u64) -> Outcome {
    let (mut ours, mut ucx) = pair(program)?;
    if seed == SEED && ucx.version < FOLLOWS_RESTARTS {
        let (major, minor) = ucx.version;
        end(ours, ucx)?;
        return Ok(format!("skipped: UCX {major}.{minor} aborts when a peer does that"));
    }
    ours.to(0, &ucx.device, &ucx.iface)?;
    ucx_to(&mut ours, &mut ucx, 0)?;
    exchange(&mut ours, &mut ucx, 0, 20)?;
    let (address, arrived) = (ours.address(), ours.sent[&0]);
    drop(ours);
    let mut ours = Ours::open(seed)?;
    let now = ours.address();
    // The incarnation, in the trailer of the device address, is another one in any case; the GID, in front, is not.
    let qpn = |a: &str| a.split(' ').nth(1).map(str::to_owned);
    if now[..34] != address[..34] || (qpn(&now) == qpn(&address)) != (seed == SEED) {
        return Err(format!("we came back as {now}, we were {address}: the scenario is not played"));
    }
    ours.to(1, &ucx.device, &ucx.iface)?;
    ours.send(1, "bcopy", 100, 20);
    ours.flush()?;
    ucx.ask(&mut ours, "wait 1 20")?;
    ucx.ask(&mut ours, &format!("wait 0 {arrived}"))?;
    if seed == SEED {
        // UCX takes it for the same connection: its old endpoint leads to us, and goes on with its own numbering.
        ucx.ask(&mut ours, "send 0 bcopy 1 100 20")?;
        ours.wait(1, 20)?;
        ucx.ask(&mut ours, "flush 0")?;
    } else {
        ucx_to(&mut ours, &mut ucx, 1)?;
        exchange(&mut ours, &mut ucx, 1, 20)?;
    }
    end(ours, ucx)
}
