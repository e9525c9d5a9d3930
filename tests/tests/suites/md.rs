//! Memory domains: registration of memory, in any size, from any thread, and its end. (UCX: test_md.)

use std::sync::atomic::{AtomicBool, Ordering};

use uct::{ErrorKind, md::MemoryDomain};
use uct_tests::{check::bytes, fabric::Sim, hooks::Hooks, on_fabrics, world::World};

on_fabrics! { sim, soft;
    reg,
    reg_multi_thread,
    reg_bad_arg;
    only sim; dereg
}

/// Three hundred sizes at random, up to a megabyte: the memory keeps what is written to it.
fn reg<F: Hooks>(w: World<F>) {
    let w = w.nodes(1);
    let md = w.nodes[0].md.clone();
    let mut rng = ib::sw::Rng::new(w.seed);
    let mut kept = Vec::new();
    for i in 0..300u64 {
        let magnitude = rng.below(21);
        let len = 1 + rng.below(1 << magnitude) as usize;
        let mut r = md.mem_alloc(len).unwrap();
        assert_eq!((r.len(), r.bytes().as_ptr() as usize % 4096), (len, 0));
        let data = bytes(i, len);
        r.bytes_mut().unwrap().copy_from_slice(&data);
        assert_eq!(r.bytes(), data);
        // Some live side by side.
        if i % 10 == 0 {
            kept.push((r, data));
        }
    }
    assert!(kept.iter().all(|(r, data)| r.bytes() == data));
    drop((kept, md));
    w.finish();
}

/// Every registration ends once, with its memory.
fn dereg(w: World<Sim>) {
    let w = w.nodes(1);
    let md = w.nodes[0].md.clone();
    let before = w.nodes[0].device.live().mrs;
    let r = md.mem_alloc(5000).unwrap();
    let slice = r.slice(10..20).unwrap();
    assert_eq!(w.nodes[0].device.live().mrs, before + 1);
    drop(r);
    assert_eq!(w.nodes[0].device.live().mrs, before + 1, "a slice keeps it");
    drop(slice);
    assert_eq!(w.nodes[0].device.live().mrs, before);
    drop(md);
    w.finish();
}

/// Registration while another thread allocates and frees.
fn reg_multi_thread<F: Hooks>(w: World<F>) {
    let w = w.nodes(1);
    let md = w.nodes[0].md.clone();
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut held: Vec<Vec<u8>> = Vec::new();
            while !done.load(Ordering::Relaxed) {
                held.push(vec![0xff; 1 + held.len() * 977 % 20_000]);
                if held.len() > 50 {
                    held.drain(..25);
                }
            }
        });
        let others: Vec<_> = (0..3u64)
            .map(|t| {
                let md = md.clone();
                s.spawn(move || {
                    for i in 0..300 {
                        let data = bytes(t << 32 | i, 1 + (i as usize * 331) % 9000);
                        let mut r = md.mem_alloc(data.len()).unwrap();
                        r.bytes_mut().unwrap().copy_from_slice(&data);
                        assert_eq!(r.bytes(), data);
                    }
                })
            })
            .collect();
        others.into_iter().for_each(|t| t.join().unwrap());
        done.store(true, Ordering::Relaxed);
    });
    drop(md);
    w.finish();
}

fn reg_bad_arg<F: Hooks>(w: World<F>) {
    let w = w.nodes(1);
    let md = &w.nodes[0].md;
    assert_eq!(md.mem_alloc(0).unwrap_err().kind(), ErrorKind::InvalidParam);
    for len in [usize::MAX, usize::MAX / 2, 1 << 62] {
        let e = md.mem_alloc(len).unwrap_err();
        assert!(matches!(e.kind(), ErrorKind::InvalidParam | ErrorKind::NoMemory), "{e}");
    }
    let r = md.mem_alloc(10).unwrap();
    let reversed = std::ops::Range { start: 5, end: 3 };
    for bad in [0..11, 11..11, reversed, usize::MAX - 1..usize::MAX] {
        assert_eq!(r.slice(bad).unwrap_err().kind(), ErrorKind::InvalidParam);
    }
    drop(r);
    w.finish();
}
