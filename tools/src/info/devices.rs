//! `uct_info -d`: devices, ports, and what each transport can do on them.

use uct::{
    Registry, Result, Worker, WorkerParams,
    config::Env,
    iface::{Caps, Counter, IfaceAttr, IfaceParams},
    md::{Md, PortResource, Transport},
};

use super::{
    Options,
    text::{bytes, columns, push_line},
};

pub(super) fn render(options: &Options, registry: &Registry, env: &Env) -> Result<String> {
    let mut out = String::new();
    let mut hidden = Vec::new();
    for component in registry.components() {
        for device in component.devices(env)? {
            let (shown, port) = options.shows_device(&device.name);
            if !shown {
                hidden.push(device.name);
                continue;
            }
            if !out.is_empty() {
                out.push('\n');
            }
            push_line(&mut out, &format!("{} (component {})", device.name, component.name()));
            if let Some(why) = device.unusable {
                columns(&mut out, 2, &[("cannot be used", why)]);
                continue;
            }
            match registry.open_md(&device.name, env) {
                Ok(md) => render_device(&mut out, (options, port), registry, &md, env)?,
                Err(e) => columns(&mut out, 2, &[("cannot be opened", e.to_string())]),
            }
        }
    }
    if out.is_empty() {
        out.push_str(&match (&options.filter, &hidden[..]) {
            (Some(text), [_, ..]) => format!("no device `{text}`; there are: {}\n", hidden.join(", ")),
            _ => "no devices\n".to_string(),
        });
    }
    if let Some(hint) = ib::component::RDMA_CORE_HINT
        && registry.components().iter().any(|c| c.name() == "ib")
    {
        push_line(&mut out, &format!("\n{hint}"));
    }
    Ok(out)
}

fn render_device(
    out: &mut String,
    (options, only): (&Options, Option<u8>),
    registry: &Registry,
    md: &Md,
    env: &Env,
) -> Result<()> {
    // Nothing is sent, so nobody has to make progress in the background.
    let worker = Worker::new(WorkerParams::default().progress_thread(false))?;
    let ports = md.ports()?;
    if let Some(n) = only
        && !ports.iter().any(|p| p.port == n)
    {
        push_line(out, &format!("  no port {n}, only {}", ports.len()));
    }
    for port in ports.into_iter().filter(|p| only.is_none_or(|n| p.port == n)) {
        push_line(out, &format!("  port {}", port.port));
        columns(out, 4, &port_rows(&port));
        for transport in registry.transports() {
            push_line(out, &format!("    transport {}", transport.name()));
            let view = transport_view(transport.as_ref(), md, &worker, port.port, env);
            columns(out, 6, &view.rows);
            if options.counters && !view.counters.is_empty() {
                push_line(out, "      counters");
                columns(out, 8, &counter_rows(&view.counters));
            }
        }
    }
    if options.counters {
        push_line(out, "  counters");
        columns(out, 4, &counter_rows(&md.counters()));
    }
    Ok(())
}

fn port_rows(port: &PortResource) -> Vec<(&'static str, String)> {
    let mut rows = vec![("state", if port.active { "up" } else { "down" }.to_string())];
    rows.extend(port.facts.iter().cloned());
    if !port.facts.iter().any(|(name, _)| *name == "gid") {
        rows.push(("gid", "none: is the network interface in this network namespace, and has it an address?".into()));
    }
    rows
}

/// What is shown of a transport on a port.
#[derive(Default)]
struct View {
    rows: Vec<(&'static str, String)>,
    counters: Vec<Counter>,
}

fn transport_view(transport: &dyn Transport, md: &Md, worker: &Worker, port: u8, env: &Env) -> View {
    let failed = |what, why| View { rows: vec![(what, why)], ..View::default() };
    if let Err(why) = transport.supports(md) {
        return failed("unsupported", why);
    }
    match transport.open_iface(md, worker, port, &IfaceParams::default(), env) {
        Ok(iface) => {
            let mut rows = attr_rows(iface.attr());
            rows.push(("device address", hex(&iface.device_address())));
            View { rows, counters: iface.counters() }
        }
        Err(e) => failed("cannot be opened", e.to_string()),
    }
}

/// What an interface can do, one fact per row.
pub(super) fn attr_rows(attr: &IfaceAttr) -> Vec<(&'static str, String)> {
    let am = &attr.am;
    let mut rows = Vec::new();
    if let Some(n) = am.max_short {
        rows.push(("am_short", format!("up to {}, its 8-byte header included", bytes(n.get()))));
    }
    if let Some(n) = am.max_bcopy {
        rows.push(("am_bcopy", format!("up to {}", bytes(n.get()))));
    }
    if let Some(n) = am.max_zcopy {
        let header = bytes(am.max_hdr);
        let text = format!("up to {} in {} pieces, of which header up to {header}", bytes(n.get()), am.max_iov);
        rows.push(("am_zcopy", text));
        rows.push((
            "alignment",
            format!("best {} for am_zcopy, unit {}", bytes(am.opt_zcopy_align), bytes(am.align_mtu)),
        ));
    }
    rows.push(("connects to", connects(attr.caps)));
    rows.push(("handlers", handlers(attr.caps)));
    let flags = [
        (Caps::PENDING, "pending queue"),
        (Caps::EP_CHECK, "endpoint check"),
        (Caps::PEER_FAILURE, "peer failure"),
        (Caps::EVENT_FD, "event fd"),
        (Caps::INTER_NODE, "other hosts"),
    ];
    rows.push(("features", list(flags.iter().filter(|(c, _)| attr.caps.contains(*c)).map(|(_, t)| *t))));
    rows.push((
        "latency",
        format!("about {} ns, overhead {} ns per message", attr.latency.as_nanos(), attr.overhead.as_nanos()),
    ));
    let bandwidth = match attr.bandwidth_bps {
        b if b > 0.0 => format!("about {:.0} MB/s, shared by all users of the port", b / 1e6),
        _ => "unknown".to_string(),
    };
    rows.push(("bandwidth", bandwidth));
    rows.push(("paths", attr.num_paths.to_string()));
    rows.push((
        "addresses",
        format!(
            "device {}, interface {}, endpoint {} bytes",
            attr.device_addr_len, attr.iface_addr_len, attr.ep_addr_len
        ),
    ));
    rows
}

fn connects(caps: Caps) -> String {
    let kinds = [(Caps::CONNECT_TO_IFACE, "interfaces"), (Caps::CONNECT_TO_EP, "endpoints")];
    list(kinds.iter().filter(|(c, _)| caps.contains(*c)).map(|(_, t)| *t))
}

fn handlers(caps: Caps) -> String {
    let kinds = [(Caps::HANDLER_SYNC, "in progress"), (Caps::HANDLER_ASYNC, "in the background")];
    list(kinds.iter().filter(|(c, _)| caps.contains(*c)).map(|(_, t)| *t))
}

fn list<'a>(items: impl Iterator<Item = &'a str>) -> String {
    let items: Vec<&str> = items.collect();
    if items.is_empty() { "none".into() } else { items.join(", ") }
}

fn counter_rows(counters: &[Counter]) -> Vec<(&'static str, String)> {
    counters.iter().map(|c| (c.name, c.value.to_string())).collect()
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
