//! The GID table of a port: asked of the library in one call where it knows how, else read from sysfs, else entry by
//! entry, and then without versions.

use std::{fs, path::Path, ptr::NonNull};

use rdma_sys::{ibv_context, ibv_gid_entry};

use super::{
    ffi::{self, Zero},
    handles::Context,
};
use crate::{
    device::{GidEntry, LinkLayer, RoceVersion, VerbsResult},
    types::Gid,
};

/// The valid entries of the table of `port`, by index. `ports_len` is the length of all tables of the device together.
pub(super) fn table(
    ctx: &Context,
    sysfs: &Path,
    port: u8,
    len: usize,
    ports_len: usize,
    link: LinkLayer,
) -> VerbsResult<Vec<GidEntry>> {
    if let Some(Ok(entries)) = from_library(ctx.ptr(), port, ports_len) {
        return Ok(entries);
    }
    if let Some(entries) = from_sysfs(&sysfs.join(format!("ports/{port}")), len, link) {
        return Ok(entries);
    }
    let mut found = Vec::new();
    for index in 0..len.min(256) {
        let gid = ctx.query_gid(port, index as i32)?;
        if gid.is_valid() {
            let version = if link == LinkLayer::Ethernet { RoceVersion::Unknown } else { RoceVersion::V2 };
            found.push(GidEntry { index: index as u8, gid, version, netdev: None });
        }
    }
    Ok(found)
}

fn from_library(ctx: NonNull<ibv_context>, port: u8, ports_len: usize) -> Option<VerbsResult<Vec<GidEntry>>> {
    let mut raw: Vec<ibv_gid_entry> = (0..ports_len.clamp(1, 1 << 16)).map(|_| ibv_gid_entry::zero()).collect();
    let n = match ffi::query_gid_table(ctx, &mut raw)? {
        Ok(n) => n,
        Err(e) => return Some(Err(e)),
    };
    let mut entries: Vec<GidEntry> =
        raw[..n].iter().filter(|e| e.port_num == u32::from(port)).filter_map(entry).collect();
    entries.sort_by_key(|e| e.index);
    Some(Ok(entries))
}

/// One entry as the library tells it. `None` for an empty one, and for one beyond the 256 that an address handle can name.
pub(super) fn entry(e: &ibv_gid_entry) -> Option<GidEntry> {
    let gid = Gid(ffi::gid_bytes(&e.gid));
    let version = match e.gid_type {
        // `IBV_GID_TYPE_IB`, which has no version.
        0 => RoceVersion::V2,
        1 => RoceVersion::V1,
        2 => RoceVersion::V2,
        _ => RoceVersion::Unknown,
    };
    let index = u8::try_from(e.gid_index).ok()?;
    gid.is_valid().then(|| GidEntry { index, gid, version, netdev: ffi::netdev_name(e.ndev_ifindex) })
}

/// The table under `ports/<n>` of a device in sysfs. `None` if there is no table to be read.
pub(super) fn from_sysfs(port: &Path, len: usize, link: LinkLayer) -> Option<Vec<GidEntry>> {
    let mut found = Vec::new();
    for index in 0..=u8::try_from(len.checked_sub(1)?).unwrap_or(u8::MAX) {
        let text = match fs::read_to_string(port.join(format!("gids/{index}"))) {
            Ok(text) => text,
            Err(_) if index == 0 => return None,
            Err(_) => break,
        };
        let Some(gid) = parse_gid(&text).filter(|g| g.is_valid()) else { continue };
        let attr = |what| fs::read_to_string(port.join(format!("gid_attrs/{what}/{index}"))).ok();
        let version = match link {
            LinkLayer::InfiniBand => RoceVersion::V2,
            LinkLayer::Ethernet => attr("types").map_or(RoceVersion::Unknown, |t| version(&t)),
        };
        let netdev = attr("ndevs").map(|n| n.trim().to_string()).filter(|n| !n.is_empty());
        found.push(GidEntry { index, gid, version, netdev });
    }
    Some(found)
}

/// What `gid_attrs/types/<i>` says. Other words than the two are not guessed at.
pub(super) fn version(text: &str) -> RoceVersion {
    match text.trim() {
        "IB/RoCE v1" => RoceVersion::V1,
        "RoCE v2" => RoceVersion::V2,
        _ => RoceVersion::Unknown,
    }
}

/// Eight groups of four hexadecimal digits.
pub(super) fn parse_gid(text: &str) -> Option<Gid> {
    let mut gid = [0; 16];
    let mut groups = text.trim().split(':');
    for out in gid.chunks_exact_mut(2) {
        let group = groups.next().filter(|g| g.len() == 4)?;
        out.copy_from_slice(&u16::from_str_radix(group, 16).ok()?.to_be_bytes());
    }
    groups.next().is_none().then_some(Gid(gid))
}

/// Where the local GID is in the table now: as RoCE v2 if it is there in both versions.
pub(super) fn find(entries: &[GidEntry], gid: Gid) -> Option<&GidEntry> {
    let same = || entries.iter().filter(|e| e.gid == gid);
    same().find(|e| e.version == RoceVersion::V2).or_else(|| same().next())
}
