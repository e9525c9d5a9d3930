//! `uct_info -r ADDRESS`: which local devices can reach a peer.

use std::net::IpAddr;

use ib::{
    addr::{AddrVersion, DeviceAddr, LinkAddr},
    types::{Gid, Mtu, PKey},
};
use uct::{
    Error, ErrorKind, Registry, Result, Worker, WorkerParams,
    config::Env,
    iface::IfaceParams,
    md::{Md, Transport},
};

use super::{
    Options,
    text::{columns, push_line},
};

pub(super) fn render(address: &str, options: &Options, registry: &Registry, env: &Env) -> Result<String> {
    let remote = parse(address)?;
    let worker = Worker::new(WorkerParams::default().progress_thread(false))?;
    let mut rows = Vec::new();
    for component in registry.components() {
        for device in component.devices(env)?.into_iter().filter(|d| options.shows(&d.name)) {
            let md = match device.unusable {
                Some(why) => Err(why),
                None => registry.open_md(&device.name, env).map_err(|e| e.to_string()),
            };
            match md {
                Err(why) => rows.push((device.name, format!("no: {why}"))),
                Ok(md) => {
                    for port in md.ports()? {
                        for transport in registry.transports() {
                            let name = format!("{}:{} {}", device.name, port.port, transport.name());
                            rows.push((name, answer(transport.as_ref(), &md, &worker, port.port, env, &remote)));
                        }
                    }
                }
            }
        }
    }
    let mut out = String::new();
    push_line(&mut out, &format!("Can {address} be reached?"));
    if rows.is_empty() {
        push_line(&mut out, "  no: there are no devices");
    }
    columns(&mut out, 2, &rows);
    Ok(out)
}

fn answer(transport: &dyn Transport, md: &Md, worker: &Worker, port: u8, env: &Env, remote: &[u8]) -> String {
    let reachable = transport.supports(md).and_then(|()| {
        let iface = transport.open_iface(md, worker, port, &IfaceParams::default(), env).map_err(|e| e.to_string())?;
        iface.is_reachable(remote)
    });
    match reachable {
        Ok(()) => "yes".into(),
        Err(why) => format!("no: {why}"),
    }
}

/// The packed device address that the user means. An IP address stands for a RoCE v2 device there.
pub(super) fn parse(text: &str) -> Result<Vec<u8>> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        let link = LinkAddr::Ethernet { gid: Gid::from_ip(ip), version: AddrVersion::V2 };
        let addr = DeviceAddr { link, pkey: PKey::DEFAULT, path_mtu: Mtu::M4096, gid_index: None, trailer: None };
        return Ok(addr.to_bytes());
    }
    let digits = text.as_bytes();
    let byte = |pair: &[u8]| std::str::from_utf8(pair).ok().and_then(|s| u8::from_str_radix(s, 16).ok());
    let valid = !digits.is_empty() && digits.len().is_multiple_of(2) && digits.iter().all(u8::is_ascii_hexdigit);
    match valid.then(|| digits.chunks(2).map(byte).collect::<Option<Vec<u8>>>()).flatten() {
        Some(bytes) => Ok(bytes),
        None => Err(Error::new(
            ErrorKind::InvalidParam,
            format!(
                "{text}: neither an IP address nor a device address in hexadecimal digits, as `uct_info -d` shows it"
            ),
        )),
    }
}
