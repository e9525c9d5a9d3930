//! Scripts over a simulated device.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use uct::mem::{Block, Buf};

use super::*;
use crate::{
    device::{
        Access, AhAttr, ArmFor, AsyncEvent, Device, GlobalRoute, QpInit, QpState, SendWr, SoftAv, UdQp, VerbsError,
        WcStatus,
    },
    sim::{SimConfig, SimDevice, SimNet},
    types::{Gid, Lid, QKey},
};

const INIT: QpInit =
    QpInit { port: 1, pkey_index: 0, qkey: QKey::UCX, send_depth: 16, recv_depth: 16, send_sge: 2, inline_len: 64 };

fn mock() -> Arc<MockDevice<SimDevice>> {
    let net = SimNet::new(1, Arc::default());
    net.set_gateway(Some(net.fresh_mac()));
    MockDevice::new(net.add_device(SimConfig::new("a", "10.0.0.1".parse().unwrap())))
}

fn to(last: u8) -> AhAttr {
    let ip = |last| Gid::from_ip([10, 0, 0, last].into());
    let grh = GlobalRoute { dgid: ip(last), sgid: ip(1), hop_limit: 64, traffic_class: 0, flow_label: 0 };
    AhAttr { port: 1, sl: 0, src_path_bits: 0, static_rate: 0, dlid: Lid(0), grh: Some(grh), soft: SoftAv::default() }
}

#[test]
fn scripts_are_followed_in_order() {
    let dev = mock();
    let errno = || dev.query_port(1).err().map(|e| e.errno);
    dev.script(Call::QueryPort, [None, Some(5)]);
    dev.fail_nth(Call::QueryPort, 4, 6);
    assert_eq!([errno(), errno(), errno(), errno(), errno()], [None, Some(5), None, Some(6), None]);
    dev.fail_always(Call::QueryPort, Some(7));
    dev.script(Call::QueryPort, [Some(8)]);
    assert_eq!([errno(), errno(), errno()], [Some(8), Some(7), Some(7)]);
    dev.fail_always(Call::QueryPort, None);
    assert_eq!(errno(), None);
    dev.fail_next(Call::QueryPort, 9);
    dev.clear_scripts();
    assert_eq!(errno(), None);
    assert_eq!((dev.calls(Call::QueryPort), dev.failures(Call::QueryPort)), (10, 5));
    // The failures of the device behind count as well.
    assert!(dev.query_port(9).is_err());
    assert_eq!(dev.failures(Call::QueryPort), 6);
}

#[test]
fn limits_and_leaks() {
    let dev = mock();
    dev.set_max(1, 1, 1);
    let block = Block::new(64, 64).unwrap();
    let ah = dev.create_ah(&to(2)).unwrap();
    let mr = dev.reg_mr(&block, Access::LOCAL_WRITE).unwrap();
    let qp = dev.create_ud_qp(&INIT).unwrap();
    let enomem = |call| Some(VerbsError::new(call, libc::ENOMEM));
    assert_eq!(dev.create_ah(&to(2)).err(), enomem("create_ah"));
    assert_eq!(dev.reg_mr(&block, Access::LOCAL_WRITE).err(), enomem("reg_mr"));
    assert_eq!(dev.create_ud_qp(&INIT).err(), enomem("create_qp"));
    assert_eq!(dev.leaks().as_deref(), Some("1 address handle, 1 queue pair, 1 registration"));
    dev.set_max(0, 0, 0);
    let second = dev.create_ah(&to(2)).unwrap();
    assert_eq!(dev.live(), MockLive { ahs: 2, qps: 1, mrs: 1 });
    // A call that fails makes nothing, and one that destroys destroys though it fails.
    assert!(dev.create_ah(&AhAttr { port: 3, ..to(2) }).is_err());
    dev.fail_next(Call::DestroyAh, libc::EIO);
    assert_eq!(dev.destroy_ah(second).err(), Some(VerbsError::new("destroy_ah", libc::EIO)));
    dev.fail_next(Call::DeregMr, libc::EBUSY);
    assert!(dev.dereg_mr(mr).is_err());
    assert_eq!(dev.live(), MockLive { ahs: 1, qps: 1, mrs: 1 });
    drop(qp);
    dev.destroy_ah(ah).unwrap();
    dev.dereg_mr(mr).unwrap();
    assert_eq!(dev.leaks(), None);
    assert!(dev.inner().live().is_zero());
    assert_eq!((dev.calls(Call::CreateAh), dev.failures(Call::CreateAh), dev.calls(Call::DestroyAh)), (4, 2, 2));
    assert_eq!((dev.calls(Call::CreateUdQp), dev.calls(Call::DestroyUdQp)), (2, 1));
}

#[test]
fn a_hook_decides_by_destination() {
    let dev = mock();
    dev.set_ah_hook(Some(Box::new(|a| (a.grh.unwrap().dgid.0[15] == 7).then_some(libc::ETIMEDOUT))));
    assert_eq!(dev.create_ah(&to(7)).err(), Some(VerbsError::new("create_ah", libc::ETIMEDOUT)));
    dev.destroy_ah(dev.create_ah(&to(8)).unwrap()).unwrap();
    dev.set_ah_hook(None);
    dev.destroy_ah(dev.create_ah(&to(7)).unwrap()).unwrap();
    assert_eq!(dev.leaks(), None);
}

#[test]
fn address_handles_wait_at_the_gate() {
    let dev = mock();
    dev.close_ah_gate();
    thread::scope(|s| {
        let calls: Vec<_> = [2, 3]
            .map(|n| {
                s.spawn({
                    let dev = &dev;
                    move || dev.create_ah(&to(n))
                })
            })
            .into();
        dev.wait_for_ah_gate(2);
        assert_eq!((dev.ah_gate_waiting(), dev.live().ahs), (2, 0));
        dev.open_ah_gate();
        for call in calls {
            dev.destroy_ah(call.join().unwrap().unwrap()).unwrap();
        }
    });
    assert_eq!((dev.ah_gate_waiting(), dev.leaks()), (0, None));
}

#[test]
fn a_queue_pair_is_counted_and_its_completions_are_forced() {
    let dev = mock();
    let mut qp = dev.create_ud_qp(&INIT).unwrap();
    let ah = dev.create_ah(&to(2)).unwrap();
    let post = |qp: &mut MockQp<SimDevice>, serial| {
        let (remote_qpn, remote_qkey) = (qp.qpn(), QKey::UCX);
        let wr = SendWr {
            serial,
            ah: &ah,
            remote_qpn,
            remote_qkey,
            sges: &[],
            inline: true,
            signaled: true,
            solicited: false,
        };
        qp.post_send(&wr)
    };
    dev.fail_next(Call::PostSend, libc::ENOMEM);
    assert_eq!(post(&mut qp, 1), Err(VerbsError::new("post_send", libc::ENOMEM)));
    dev.force_send_status(WcStatus::Other(77));
    for serial in [1, 2] {
        post(&mut qp, serial).unwrap();
    }
    qp.ring();
    let mut out = Vec::new();
    qp.poll_send(&mut out, 8);
    assert_eq!(out.iter().map(|w| w.status).collect::<Vec<_>>(), [WcStatus::Other(77), WcStatus::Success]);

    dev.fail_next(Call::PostRecv, libc::EIO);
    let mut bufs = vec![Buf::alloc(64).unwrap()];
    assert!(qp.post_recv(&mut bufs).is_err());
    assert_eq!(bufs.len(), 1);
    qp.post_recv(&mut bufs).unwrap();
    dev.inner().fail_qps();
    dev.force_recv_status(WcStatus::LocalLength);
    let mut got = Vec::new();
    qp.poll_recv(&mut got, 8);
    assert_eq!(got[0].status, WcStatus::LocalLength);
    dev.fail_next(Call::Reset, libc::EIO);
    assert!(qp.reset().is_err());
    qp.reset().unwrap();
    dev.fail_next(Call::Arm, libc::ENOMEM);
    assert!(qp.arm(ArmFor::RECV).is_err());
    let counts = [Call::PostSend, Call::Ring, Call::PollSend, Call::PostRecv, Call::PollRecv, Call::Reset, Call::Arm];
    assert_eq!(counts.map(|c| dev.calls(c)), [3, 1, 1, 2, 1, 2, 1]);
    dev.destroy_ah(ah).unwrap();
}

#[test]
fn events_and_attributes_are_overlaid() {
    let dev = mock();
    dev.inner().inject_event(AsyncEvent::SmChange(1));
    dev.inject_event(AsyncEvent::DeviceFatal);
    let events: Vec<_> = std::iter::from_fn(|| dev.poll_async_event()).collect();
    assert_eq!(events, [AsyncEvent::DeviceFatal, AsyncEvent::SmChange(1)]);
    assert!(!dev.attr().ah_create_sleeps);
    dev.set_attr(|a| a.ah_create_sleeps = true);
    assert!(dev.attr().ah_create_sleeps && dev.attr().name == "a");
    assert_eq!(dev.query_gids(1).unwrap().len(), 1);
}

#[test]
fn a_reset_hangs_where_calls_may_sleep() {
    let dev = mock();
    let mut qp = dev.create_ud_qp(&INIT).unwrap();
    dev.hold_resets();
    assert!(qp.begin_reset(Arc::new(|| {})).unwrap().is_none(), "done at once");
    dev.set_attr(|a| a.ah_create_sleeps = true);
    let woken = Arc::new(AtomicUsize::new(0));
    let w = woken.clone();
    let wake = move || {
        w.fetch_add(1, Ordering::Relaxed);
    };
    let job = qp.begin_reset(Arc::new(wake.clone())).unwrap().unwrap();
    let qpn = qp.qpn();
    job();
    assert_eq!((dev.held_resets(), dev.calls(Call::Reset), woken.load(Ordering::Relaxed)), (1, 1, 0));
    assert_eq!((qp.state(), qp.finish_reset()), (QpState::Error, None));
    let busy = |call| Err(VerbsError::new(call, libc::EBUSY));
    let mut bufs = vec![Buf::alloc(64).unwrap()];
    assert_eq!((qp.reset(), qp.post_recv(&mut bufs), bufs.len()), (busy("modify_qp"), busy("post_recv"), 1));
    dev.fail_next(Call::Reset, libc::EIO);
    dev.release_resets();
    assert_eq!((dev.held_resets(), dev.calls(Call::Reset), woken.load(Ordering::Relaxed)), (0, 2, 1));
    assert_eq!(qp.finish_reset(), Some(Err(VerbsError::new("modify_qp", libc::EIO))));
    assert_eq!((qp.state(), qp.qpn()), (QpState::ReadyToSend, qpn), "as it was");

    // Nothing hangs any more; one that is left ends with the reset, and then what it may name.
    let job = qp.begin_reset(Arc::new(wake)).unwrap().unwrap();
    let rest = Arc::new(());
    qp.destroy(Box::new(rest.clone()));
    assert_eq!((dev.live().qps, Arc::strong_count(&rest)), (1, 2));
    job();
    assert_eq!((dev.leaks(), Arc::strong_count(&rest), dev.calls(Call::DestroyUdQp)), (None, 1, 1));
    assert!(dev.inner().live().is_zero());
}
