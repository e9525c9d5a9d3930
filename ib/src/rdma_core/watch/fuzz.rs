//! The fuzz target for what the kernel says on the watch's socket; see [`crate::fuzz`].

use super::{
    message::{self, Item},
    paths::{Event, ID_RESERVED, Paths},
};
use crate::{ah::AhPath, types::Gid};

const PORT: u32 = 7;
const PATHS: [(&str, &str); 4] =
    [("10.0.0.1", "10.0.0.2"), ("10.0.0.1", "10.1.0.2"), ("fd77::1", "fd77::2"), ("10.0.0.1", "10.0.0.3")];

fn path(i: usize) -> Option<AhPath> {
    let (sgid, dgid) = PATHS[i % PATHS.len()];
    Some(AhPath { dgid: Gid::from_ip(dgid.parse().ok()?), sgid: Gid::from_ip(sgid.parse().ok()?), port: 1 })
}

/// Any bytes as what the kernel says in several datagrams, each behind a byte that says what else happens and two with its
/// length. What is made of it concerns paths that are watched, and no others; nothing grows without a bound.
///
/// # Panics
/// If it does not hold.
pub fn netlink(mut bytes: &[u8]) {
    let mut paths = Paths::new();
    for i in 0..PATHS.len() {
        paths.extend(path(i));
    }
    while let Some((&[what, low, high], rest)) = bytes.split_first_chunk() {
        let (datagram, rest) = rest.split_at(usize::from(u16::from_le_bytes([low, high])).min(rest.len()));
        bytes = rest;
        let mut items = Vec::new();
        message::parse(datagram, PORT, &mut items);
        // The shortest message has 16 bytes, and comes to three items at most.
        assert!(items.len() <= 3 * (datagram.len() / 16), "{} items of {} bytes", items.len(), datagram.len());
        for item in items {
            match item {
                Item::Event(event) => paths.handle(event),
                Item::Answer(id, answer) => paths.answer(id, answer),
                Item::DumpInterrupted => paths.handle(Event::Lost),
                Item::DumpEnd => {}
            }
        }
        match what & 7 {
            0..4 => {
                while let Some(question) = paths.next_question() {
                    assert!(question.id > ID_RESERVED);
                    assert!(!message::question(&question).is_empty());
                }
            }
            4 => paths.retain(&path(usize::from(what >> 3)).into_iter().collect::<Vec<_>>()),
            5 => paths.extend(path(usize::from(what >> 3))),
            _ => {
                let _ = paths.take_dump_request();
            }
        }
        let watched: Vec<AhPath> = (0..PATHS.len()).filter_map(path).collect();
        assert!(paths.take_news().keys().all(|p| watched.contains(p)), "news of a path that was never watched");
        assert!(paths.len() <= PATHS.len());
    }
}

impl Paths {
    fn extend(&mut self, path: Option<AhPath>) {
        if let Some(path) = path {
            self.add(path, 2);
        }
    }
}
