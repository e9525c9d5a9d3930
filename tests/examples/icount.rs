//! One process, one interface, an endpoint to itself, short messages one after the other: for counting instructions.
//!
//! `ci/icount` runs it under callgrind, which cuts its counts at each call of [`mark`]: between the second and the third
//! there are exactly `--count` messages, sent and received, with the acknowledgements that they take, and nothing else.

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use clap::Parser;
use uct::{AmId, Ep, EpParams, IfaceParams, Registry, SendError, Worker, config::Env};

#[derive(Parser)]
struct Options {
    /// Device and port, as `uct_perf -d` takes them.
    #[arg(short, long, default_value = "soft0:1")]
    device: String,
    /// How many messages are counted.
    #[arg(short = 'n', long, default_value_t = 2000)]
    count: u64,
    /// How many go before them, uncounted.
    #[arg(short, long, default_value_t = 500)]
    warmup: u64,
    /// Bytes behind the header of 8.
    #[arg(short, long, default_value_t = 0)]
    size: usize,
    /// Count calls of progress that find nothing, instead of messages.
    #[arg(long)]
    idle: bool,
}

/// Where counting begins or ends.
#[inline(never)]
fn mark(what: &str) {
    black_box(what);
}

struct Loop {
    worker: Worker,
    ep: Ep,
    id: AmId,
    arrived: Arc<AtomicU64>,
    payload: Vec<u8>,
}

impl Loop {
    /// Sends and receives `n` messages; answers how often it had to call `progress`. It is not inlined so that what counts
    /// is a function of its own, the same each time.
    #[inline(never)]
    fn run(&self, n: u64) -> uct::Result<u64> {
        let mut calls = 0;
        let until = self.arrived.load(Relaxed) + n;
        for i in self.arrived.load(Relaxed)..until {
            while let Err(e) = self.ep.am_short(self.id, i, &self.payload) {
                match e {
                    SendError::NoResource => self.worker.progress(),
                    SendError::Failed(why) => return Err(why),
                };
                calls += 1;
            }
            while self.arrived.load(Relaxed) <= i {
                self.worker.progress();
                calls += 1;
            }
        }
        Ok(calls)
    }

    /// Calls `progress` `n` times, with nothing on its way.
    #[inline(never)]
    fn idle(&self, n: u64) -> uct::Result<u64> {
        for _ in 0..n {
            self.worker.progress();
        }
        Ok(n)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::parse();
    let (device, port) = options.device.split_once(':').unwrap_or((&options.device, "1"));
    let env = Env::process();
    let mut registry = Registry::new();
    ib::component::register(&mut registry);
    ud::register(&mut registry);
    let md = registry.open_md(device, &env)?;
    // Without the progress thread, whose work depends on time.
    let worker = Worker::new(ud::worker_params(&env)?.progress_thread(false))?;
    let iface = registry.transport("ud")?.open_iface(&md, &worker, port.parse()?, &IfaceParams::default(), &env)?;
    let id = AmId::new(5)?;
    let arrived = Arc::new(AtomicU64::new(0));
    let seen = arrived.clone();
    iface.on_am(id, move |_| seen.store(seen.load(Relaxed) + 1, Relaxed))?;
    iface.progress_enable(true);
    let ep = iface.ep(&EpParams::to_iface(&iface.device_address(), &iface.iface_address()))?;
    let it = Loop { worker, ep, id, arrived, payload: vec![7; options.size] };

    // Until the handshake is over and the window is open.
    it.run(options.warmup)?;
    mark("warm-up over");
    // What is done once in a while shows in the first part and not only in the second: they are compared.
    let run = if options.idle { Loop::idle } else { Loop::run };
    run(&it, options.count)?;
    mark("begin");
    let calls = run(&it, options.count)?;
    mark("end");
    let messages = if options.idle { 0 } else { options.count };
    println!("messages {messages}, calls of progress {calls}");
    Ok(())
}
