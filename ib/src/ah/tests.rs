use super::{testing::*, *};

fn got(answer: TryGet<FakeDevice>) -> AhRef<FakeDevice> {
    match answer {
        TryGet::Ready(ah) => ah,
        other => panic!("expected a handle, got {other:?}"),
    }
}

#[test]
fn a_second_get_shares_the_handle() {
    let rig = Rig::new(FakeDevice::new(false), config(AhTtl::Infinite));
    let a = got(rig.cache.try_get(&key(1), GetOptions::local("test")));
    let b = got(rig.cache.try_get(&key(1), GetOptions::local("test")));
    assert!(a.is_same(&b));
    assert_eq!(rig.device.calls(), 1);
}
