//! The first program of the README: one active message from one interface to another.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use uct::{AmId, EpParams, IfaceParams, Registry, SendError, Worker, config::Env};

fn main() -> uct::Result<()> {
    // What there is. Settings come from UCX_* variables.
    let env = Env::process();
    let mut registry = Registry::new();
    ib::component::register(&mut registry);
    ud::register(&mut registry);

    // The soft device, and two interfaces on it. Usually they are in two processes that exchange their addresses.
    let md = registry.open_md("soft0", &env)?;
    let worker = Worker::new(ud::worker_params(&env)?)?;
    let open = || registry.transport("ud")?.open_iface(&md, &worker, 1, &IfaceParams::default(), &env);
    let (alice, bob) = (open()?, open()?);

    // Bob knows what to do with messages of id 5, then takes part.
    let hello = AmId::new(5)?;
    let arrived = Arc::new(AtomicBool::new(false));
    let seen = arrived.clone();
    bob.on_am(hello, move |msg| {
        let (header, payload) = msg.data().split_at(8);
        println!("bob got {header:?} {}", String::from_utf8_lossy(payload));
        seen.store(true, Relaxed);
    })?;
    alice.progress_enable(true);
    bob.progress_enable(true);

    // Alice sends. `NoResource` says "not now", here because the handshake is under way: progress changes that.
    let ep = alice.ep(&EpParams::to_iface(&bob.device_address(), &bob.iface_address()))?;
    while let Err(e) = ep.am_short(hello, 42, b"hello, bob") {
        match e {
            SendError::NoResource => worker.progress(),
            SendError::Failed(why) => return Err(why),
        };
    }
    while !arrived.load(Relaxed) {
        worker.progress();
    }
    Ok(())
}
