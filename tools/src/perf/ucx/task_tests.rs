use super::*;

fn task() -> Task {
    Task { test: Test::Bw, layout: Layout::Bcopy, size: 4096, iters: 77, warmup: 5, window: 127 }
}

/// What clients sent for `-t am_bw -D bcopy -s 16 -n 3 -w 0`, but for transport and device: offset and bytes of what is not
/// zero.
fn captured(version: Version) -> Vec<u8> {
    match version {
        Version::V1_13 => captured_1_13(),
        Version::V1_19 => filled(
            528,
            &[
                (8, &[2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3]),
                (36, &[0x80, 0, 0, 0, 0x80, 0x29, 0x12, 0x19, 0, 0, 0, 0, 1]),
                (65, &[0x10]),
                (88, &[0x9a, 0x99, 0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f, 3]),
                (118, &[0xf0, 0x3f, 0, 0, 0, 0, 0, 0, 0x49, 0x40]),
                (160, b"rxe0:1"),
                (192, b"ud_verbs"),
                (220, &[2, 0, 0, 0, 127]),
                (232, &[8]),
                (520, &[7]),
            ],
        ),
        Version::V1_20 => filled(
            560,
            &[
                (8, &[2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3]),
                (36, &[9, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 9, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0x80]),
                (64, &[0x70, 0x47, 0x58, 0x19, 0, 0, 0, 0, 1]),
                (89, &[0x10]),
                (112, &[0x9a, 0x99, 0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f, 3]),
                (142, &[0xf0, 0x3f, 0, 0, 0, 0, 0, 0, 0x49, 0x40, 1, 0, 0, 0, 1]),
                (192, b"rxe0:1"),
                (224, b"ud_verbs"),
                (252, &[2, 0, 0, 0, 127]),
                (264, &[8]),
                (552, &[7]),
            ],
        ),
        Version::V1_21 => filled(
            584,
            &[
                (8, &[2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3]),
                (36, &[10, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 10, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0x80]),
                (64, &[0xd0, 0x43, 0xee, 0x0a, 0, 0, 0, 0, 1]),
                (89, &[0x10]),
                (112, &[0x9a, 0x99, 0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f, 3]),
                (142, &[0xf0, 0x3f, 0, 0, 0, 0, 0, 0, 0x49, 0x40]),
                (160, &[0xac, 0x32, 0x6b, 0x36, 0x7d, 0x8e, 0x07, 0x5f, 1, 0, 0, 0, 1, 0, 0, 0, 4]),
                (216, b"rxe0:1"),
                (248, b"ud_verbs"),
                (276, &[2, 0, 0, 0, 127]),
                (288, &[8]),
                (576, &[7]),
            ],
        ),
    }
}

fn filled(len: usize, parts: &[(usize, &[u8])]) -> Vec<u8> {
    let mut p = vec![0; len];
    for (at, bytes) in parts {
        p[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    p.extend(16u64.to_le_bytes());
    p
}

fn captured_1_13() -> Vec<u8> {
    let parts = [
        (8, &[2u8][..]),
        (16, &[1, 0, 0, 0, 1, 0, 0, 0, 3]),
        (36, &[0x80, 0, 0, 0, 0x40, 0x14, 0xbc, 0xdf, 0x9a, 0x55, 0, 0, 1]),
        (65, &[0x10]),
        (88, &[0x9a, 0x99, 0x99, 0x99, 0x99, 0x99, 0xb9, 0x3f, 3]),
        (118, &[0xf0, 0x3f, 0, 0, 0, 0, 0, 0, 0x49, 0x40]),
        (152, b"rxe0:1"),
        (184, b"ud_verbs"),
        (212, &[2, 0, 0, 0, 127]),
        (224, &[8]),
        (256, &[7]),
    ];
    filled(264, &parts)
}

#[test]
fn what_clients_sent_is_read() {
    let want = Task { test: Test::Bw, layout: Layout::Bcopy, size: 16, iters: 3, warmup: 0, window: 127 };
    for version in Version::ALL {
        let mut bytes = captured(version);
        let found = Ok(Found::Task(want.clone(), version, bytes.len()));
        assert_eq!(Task::recognise(&bytes, None), found);
        // The status comes with it, in whole or in part.
        bytes.extend(1u64.to_le_bytes());
        bytes.push(0);
        assert_eq!(Task::recognise(&bytes, None), found);
    }
}

#[test]
fn what_is_written_is_what_clients_write() {
    let task = Task { test: Test::Bw, layout: Layout::Bcopy, size: 16, iters: 3, warmup: 0, window: 127 };
    for version in Version::ALL {
        let mut want = captured(version);
        // The pointer to the sizes is the sender's own, and so is the random seed.
        let pointer = version.fields().size_count - 8;
        want[pointer..pointer + 8].fill(0);
        if version == Version::V1_21 {
            want[160..168].fill(0);
        }
        assert_eq!(task.encode(version, "rxe0:1"), want, "{version}");
    }
    let long = task.encode(Version::V1_13, &"x".repeat(40));
    assert_eq!((&long[182..184], &long[184..192]), (&b"x\0"[..], &b"ud_verbs"[..]));
}

#[test]
fn all_versions_are_recognised_by_length() {
    let lengths = [264 + 8, 528 + 8, 560 + 8, 584 + 8];
    for (version, len) in Version::ALL.into_iter().zip(lengths) {
        let mut bytes = task().encode(version, "rxe0:1");
        assert_eq!(bytes.len(), len);
        for n in 0..len {
            assert_eq!(Task::recognise(&bytes[..n], None), Ok(Found::Unknown), "{version} cut to {n}");
        }
        assert_eq!(Task::recognise(&bytes, None), Ok(Found::Task(task(), version, len)));
        for other in Version::ALL.into_iter().filter(|&v| v != version) {
            assert_eq!(Task::recognise(&bytes, Some(other)), Ok(Found::Unknown), "{version} as {other}");
        }
        bytes.extend([0; 10]);
        assert_eq!(Task::recognise(&bytes, None), Ok(Found::Unknown), "longer by a struct of another version");
    }
    let text = unknown(289, None);
    let known = "1.13 to 1.16 (264 bytes), 1.19 (528 bytes), 1.20 (560 bytes), 1.21 to 1.23 (584 bytes)";
    assert!(text.contains("a struct of some 272;") && text.ends_with(known), "{text}");
}

#[test]
fn pieces_add_up() {
    for version in Version::ALL {
        let f = version.fields();
        let mut bytes = task().encode(version, "rxe0:1");
        bytes[f.size_count..f.size_count + 8].copy_from_slice(&2u64.to_le_bytes());
        bytes.extend(100u64.to_le_bytes());
        let found = Task::recognise(&bytes, None);
        assert_eq!(found, Ok(Found::Task(Task { size: 4196, ..task() }, version, f.len + 16)));
        let n = bytes.len();
        bytes[n - 8..].fill(0xff);
        assert!(matches!(Task::recognise(&bytes, None), Ok(Found::Task(t, ..)) if t.size == usize::MAX));
    }
}

#[test]
fn what_is_not_played_is_refused_with_the_reason() {
    for version in Version::ALL {
        let f = version.fields();
        for (at, value, words) in [
            (API, 1, "a UCP test"),
            (COMMAND, 1, "command 1, test type 2"),
            (TEST_TYPE, 3, "command 0, test type 3"),
            (f.flags, FLAG_VALIDATE, "validation"),
            (THREADS, 2, "2 threads"),
            (f.iters, 0, "by count"),
            (f.max_time + 4, 0x3ff0_0000, "by count"),
            (f.transport, u32::from_le_bytes(*b"rc_v"), "transport `rc_verbs`"),
            (f.layout, 4, "data layout 4"),
            (f.window, 128, "window of 128"),
            (f.len, 0, "without content"),
        ] {
            let mut bytes = task().encode(version, "rxe0:1");
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let e = Task::recognise(&bytes, None).unwrap_err();
            assert!(e.contains(words), "{version} {at}: {e}");
        }
    }
}

#[test]
fn versions_have_names() {
    for (text, version) in [
        ("1.13", Version::V1_13),
        ("1.13.1", Version::V1_13),
        ("1.16", Version::V1_13),
        ("1.19.0", Version::V1_19),
        ("1.20", Version::V1_20),
        ("1.22", Version::V1_21),
        ("1.23", Version::V1_21),
    ] {
        assert_eq!(text.parse(), Ok(version));
    }
    for bad in ["", "1.1", "1.130", "1.18", "2"] {
        assert!(bad.parse::<Version>().is_err(), "{bad}");
    }
    let e = "1.18".parse::<Version>().unwrap_err();
    assert_eq!(e, "known are the parameters of UCX 1.13 to 1.16, 1.19, 1.20, 1.21 to 1.23");
}
