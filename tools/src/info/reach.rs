//! `uct_info -r ADDRESS`: which local devices can reach a peer.

use std::net::IpAddr;

use ib::{
    addr::{AddrVersion, DeviceAddr, LinkAddr},
    types::{Gid, Mtu, PKey},
};
use uct::{Error, ErrorKind, IfaceParams, Registry, Result, Worker, WorkerParams, config::Env};

use super::{
    Options,
    text::{columns, push_line},
};

pub(super) fn render(address: &str, options: &Options, registry: &Registry, env: &Env) -> Result<String> {
    let remote = parse(address)?;
    let worker = Worker::new(WorkerParams::default().progress_thread(false))?;
    let found = registry.resources(env)?;
    let mut rows = Vec::new();
    for resource in &found.usable {
        let reachable = registry.open_md(&resource.device, env).and_then(|md| {
            let iface = resource.transport.open_iface(&md, &worker, resource.port, &IfaceParams::default(), env)?;
            Ok(iface.is_reachable(&remote))
        });
        let answer = match reachable {
            Ok(Ok(())) => "yes".to_string(),
            Ok(Err(why)) => format!("no: {why}"),
            Err(e) => format!("no: {e}"),
        };
        rows.push((resource.to_string(), answer));
    }
    rows.extend(found.refused.into_iter().map(|(name, why)| (name, format!("no: {why}"))));
    rows.retain(|(name, _)| options.shows(name));
    let mut out = String::new();
    push_line(&mut out, &format!("Can {address} be reached?"));
    if rows.is_empty() {
        push_line(&mut out, "  no: there is no device with a transport");
    }
    columns(&mut out, 2, &rows);
    Ok(out)
}

/// The packed device address that the user means. An IP address stands for a RoCE v2 device there.
pub(crate) fn parse(text: &str) -> Result<Vec<u8>> {
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
