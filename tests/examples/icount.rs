//! One process, two interfaces on the soft device, `n` short messages one after the other: for counting instructions.
//!
//! `valgrind --tool=callgrind target/release/examples/icount N` with two values of N (and the name of another device); the difference, divided by the
//! difference in N, is what one message costs in user space, sender and receiver together, system calls' entry included.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use uct::{AmId, EpParams, IfaceParams, Registry, SendError, Worker, config::Env};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let n: u64 = std::env::args().nth(1).ok_or("how many messages?")?.parse()?;
    let env = Env::process();
    let mut registry = Registry::new();
    ib::component::register(&mut registry);
    ud::register(&mut registry);
    let device = std::env::args().nth(2).unwrap_or_else(|| "soft0".into());
    let md = registry.open_md(&device, &env)?;
    // Without the progress thread, whose work depends on time.
    let worker = |_| Worker::new(ud::worker_params(&env)?.progress_thread(false));
    let (wa, wb) = (worker(0)?, worker(1)?);
    let open = |w: &Worker| registry.transport("ud")?.open_iface(&md, w, 1, &IfaceParams::default(), &env);
    let (a, b) = (open(&wa)?, open(&wb)?);
    let id = AmId::new(5)?;
    let arrived = Arc::new(AtomicU64::new(0));
    let seen = arrived.clone();
    b.on_am(id, move |_| seen.store(seen.load(Relaxed) + 1, Relaxed))?;
    a.progress_enable(true);
    b.progress_enable(true);
    let ep = a.ep(&EpParams::to_iface(&b.device_address(), &b.iface_address()))?;
    for i in 0..n {
        loop {
            match ep.am_short(id, i, &[]) {
                Ok(()) => break,
                Err(SendError::NoResource) => wa.progress() + wb.progress(),
                Err(SendError::Failed(e)) => return Err(e.into()),
            };
        }
        while arrived.load(Relaxed) <= i {
            wb.progress();
        }
    }
    Ok(())
}
