//! The other side of rdma-core's `ibv_ud_pingpong`, on a soft device: plain UD datagrams through `ib`, with no transport above.
//!
//! Both exchange address and queue pair number over TCP, as text, then bounce datagrams; nothing is repeated, so a network
//! that loses one stops them, as it stops rdma-core's program. Every payload is checked.
#![deny(unsafe_code)]

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv6Addr, TcpListener, TcpStream},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use ib::{
    device::{Access, AhAttr, Device, GRH_LEN, GlobalRoute, QpInit, SendWr, Sge, UdQp, WcStatus},
    soft::{SoftConfig, SoftDevice},
    types::{Gid, Lid, QKey, Qpn},
};
use uct::mem::{Arena, ArenaLayout};
use uct_tests::lines::pingpong::{Hello, LEN};

/// The options have the letters of `ibv_ud_pingpong`.
#[derive(Parser)]
struct Options {
    /// Host of the server; without it, this is the server
    host: Option<String>,
    /// Address of the soft device
    #[arg(long)]
    addr: IpAddr,
    /// TCP port
    #[arg(short, long, default_value_t = 18515)]
    port: u16,
    /// Bytes per datagram, the same on both sides
    #[arg(short, long, default_value_t = 1024)]
    size: usize,
    /// Datagrams each way, the same on both sides
    #[arg(short = 'n', long, default_value_t = 1000)]
    iters: u32,
}

/// The key that rdma-core's program uses.
const QKEY: QKey = QKey(0x1111_1111);
/// What a payload is filled with; rdma-core repeats one byte as well.
const FILL: u8 = 0x7b;
const PATIENCE: Duration = Duration::from_secs(60);

fn exchange(o: &Options, qpn: Qpn, gid: Gid) -> io::Result<Result<Hello, String>> {
    let ours = Hello { qpn, gid }.to_bytes();
    let mut theirs = [0; LEN];
    match &o.host {
        Some(host) => {
            let mut s = TcpStream::connect((host.as_str(), o.port))?;
            s.write_all(&ours)?;
            s.read_exact(&mut theirs)?;
            s.write_all(b"done\0")?;
        }
        None => {
            let mut s = TcpListener::bind((Ipv6Addr::UNSPECIFIED, o.port))?.accept()?.0;
            s.read_exact(&mut theirs)?;
            s.write_all(&ours)?;
            // It says so when its queue pair is ready.
            s.read_exact(&mut [0; 5])?;
        }
    }
    Ok(Hello::parse(&theirs))
}

fn run(o: &Options) -> Result<String, Box<dyn std::error::Error>> {
    let device = SoftDevice::open(&SoftConfig::at(o.addr))?;
    let init =
        QpInit { port: 1, pkey_index: 0, qkey: QKEY, send_depth: 16, recv_depth: 500, send_sge: 1, inline_len: 0 };
    let mut qp = device.create_ud_qp(&init)?;
    let layout = ArenaLayout { count: 501, len: GRH_LEN + o.size, front: 0, align: 64, align_offset: 0 };
    let (arena, mut spare) = Arena::new(layout)?;
    arena.set_lkey(device.reg_mr(arena.block(), Access::LOCAL_WRITE)?.lkey);
    let mut out = spare.pop().ok_or("no buffer")?;
    out.fill(FILL);
    qp.post_recv(&mut spare)?;

    let remote =
        exchange(o, qp.qpn(), device.gid())?.map_err(|why| format!("the other side is no ibv_ud_pingpong: {why}"))?;
    let route = GlobalRoute { dgid: remote.gid, sgid: device.gid(), hop_limit: 64, traffic_class: 0, flow_label: 0 };
    let ah = device.create_ah(&AhAttr {
        port: 1,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        dlid: Lid(0),
        grh: Some(route),
        soft: Default::default(),
    })?;

    let (mut sent, mut received) = (0, 0);
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    let mut want = u32::from(o.host.is_some());
    let mut news = Instant::now();
    while received < o.iters || sent < o.iters {
        while sent < want {
            sent += 1;
            let sges = [Sge { bytes: &out[..o.size], lkey: out.lkey() }];
            qp.post_send(&SendWr {
                serial: sent.into(),
                ah: &ah,
                remote_qpn: remote.qpn,
                remote_qkey: QKEY,
                sges: &sges,
                inline: false,
                signaled: true,
                solicited: false,
            })?;
        }
        qp.ring();
        sends.clear();
        qp.poll_send(&mut sends, 16);
        if let Some(bad) = sends.iter().find(|w| w.status != WcStatus::Success) {
            return Err(format!("send {}: {:?}", bad.serial, bad.status).into());
        }
        qp.poll_recv(&mut receives, 16);
        if receives.is_empty() && news.elapsed() > PATIENCE {
            return Err(
                format!("nothing came for a minute: {sent} sent, {received} received; {}", device.stats()).into()
            );
        }
        for wc in receives.drain(..) {
            news = Instant::now();
            received += 1;
            let payload = wc.buf.get(GRH_LEN..wc.byte_len as usize).unwrap_or_default();
            let first = payload.first().copied().unwrap_or(0);
            if wc.status != WcStatus::Success || wc.src_qpn != remote.qpn || payload.len() != o.size {
                return Err(format!(
                    "receive {received}: {:?}, {} bytes from {:?}",
                    wc.status,
                    payload.len(),
                    wc.src_qpn
                )
                .into());
            }
            if payload.iter().any(|&b| b != first) {
                return Err(format!("receive {received}: the content is not what rdma-core fills in").into());
            }
            want = (want + 1).min(o.iters);
            spare.push(wc.buf);
        }
        qp.post_recv(&mut spare)?;
        std::thread::yield_now();
    }
    Ok(format!("{sent} datagrams sent, {received} received, {} bytes each", o.size))
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("ud_pingpong: {e}");
            ExitCode::FAILURE
        }
    }
}
