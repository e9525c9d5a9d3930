//! Active messages of every kind.

use uct::AmId;
use uct_tests::{fabric::Fabric, on_fabrics, world::World};

on_fabrics! { sim, soft; am_short_reaches_the_peer }

fn am_short_reaches_the_peer<F: Fabric>(w: World<F>) {
    let mut w = w.nodes(2);
    let ep = w.nodes[0].connect(&w.nodes[1]);
    let id = AmId::truncate(5);
    for i in 0..200u64 {
        w.send(|| ep.am_short(id, i, b"payload"));
    }
    w.run_until("all arrive", |w| w.nodes[1].inbox.lock().len() == 200);
    for (i, m) in w.nodes[1].take().iter().enumerate() {
        let mut want = (i as u64).to_ne_bytes().to_vec();
        want.extend(b"payload");
        assert_eq!((m.id, &m.data), (5, &want));
    }
    w.settle();
}
