use super::*;

fn task() -> Task {
    Task { test: Test::Bw, layout: Layout::Bcopy, size: 4096, iters: 77, warmup: 5, window: 127 }
}

/// What a UCX 1.13.1 sent for `-t am_bw -D bcopy -s 16 -n 3 -w 0`: offset and bytes of what is not zero.
fn captured() -> Vec<u8> {
    let mut p = vec![0; 264];
    for (at, bytes) in [
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
    ] {
        p[at..at + bytes.len()].copy_from_slice(bytes);
    }
    p.extend(16u64.to_le_bytes());
    p
}

#[test]
fn what_a_ucx_sent_is_read() {
    let want = Task { test: Test::Bw, layout: Layout::Bcopy, size: 16, iters: 3, warmup: 0, window: 127 };
    let mut bytes = captured();
    assert_eq!(Task::recognise(&bytes, None), Ok(Found::Task(want.clone(), Version::V1_13, 272)));
    // The status comes with it, in whole or in part.
    bytes.extend(1u64.to_le_bytes());
    bytes.push(0);
    assert_eq!(Task::recognise(&bytes, None), Ok(Found::Task(want, Version::V1_13, 272)));
}

#[test]
fn what_is_written_is_what_a_ucx_writes() {
    let task = Task { test: Test::Bw, layout: Layout::Bcopy, size: 16, iters: 3, warmup: 0, window: 127 };
    let mut want = captured();
    // The pointer to the sizes is the sender's own.
    want[40..48].fill(0);
    assert_eq!(task.encode(Version::V1_13, "rxe0:1"), want);
    let long = task.encode(Version::V1_13, &"x".repeat(40));
    assert_eq!((&long[182..184], &long[184..192]), (&b"x\0"[..], &b"ud_verbs"[..]));
}

#[test]
fn both_versions_are_recognised_by_length() {
    for (version, len) in [(Version::V1_13, 264 + 8), (Version::V1_23, 584 + 8)] {
        let mut bytes = task().encode(version, "rxe0:1");
        assert_eq!(bytes.len(), len);
        for n in 0..len {
            assert_eq!(Task::recognise(&bytes[..n], None), Ok(Found::Unknown), "{version} cut to {n}");
        }
        assert_eq!(Task::recognise(&bytes, None), Ok(Found::Task(task(), version, len)));
        let other = Version::ALL.into_iter().find(|&v| v != version);
        assert_eq!(Task::recognise(&bytes, other), Ok(Found::Unknown));
        bytes.extend([0; 10]);
        assert_eq!(Task::recognise(&bytes, None), Ok(Found::Unknown), "longer by a struct of another version");
    }
    let text = unknown(289, None);
    assert!(text.contains("a struct of some 272; known are those of 1.13 (264 bytes) and 1.23 (584 bytes)"), "{text}");
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
    assert_eq!("1.13".parse(), Ok(Version::V1_13));
    assert_eq!("1.13.1".parse(), Ok(Version::V1_13));
    assert_eq!("1.23".parse(), Ok(Version::V1_23));
    for bad in ["", "1.1", "1.130", "1.18", "2"] {
        assert!(bad.parse::<Version>().is_err(), "{bad}");
    }
}
