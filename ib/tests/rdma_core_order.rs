//! The order of the calls of libibverbs: configuration is read before any of them, `ibv_fork_init` comes before devices are
//! listed, and that before one is opened and memory registered. Functions here take the place of the library's, note that
//! they were called, and go on to it; without a device there is less to note.
#![cfg(feature = "rdma-core")]

use std::{
    ffi::{CStr, c_int, c_void},
    mem::transmute,
    sync::Mutex,
};

use ib::{
    device::{Access, Device},
    md::Md,
    rdma_core::RdmaDevice,
};
use uct::{
    Registry,
    config::Env,
    mem::{Arena, ArenaLayout},
};

static CALLS: Mutex<Vec<&str>> = Mutex::new(Vec::new());

/// Notes a call and returns the function of libibverbs that it is meant for.
fn on_to(name: &'static CStr) -> *mut c_void {
    CALLS.lock().unwrap().push(name.to_str().unwrap());
    // SAFETY: a text that ends in a zero byte.
    let f = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    assert!(!f.is_null(), "{name:?} in libibverbs");
    f
}

#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    // SAFETY: the function of that name has this signature.
    let f = unsafe { transmute::<*mut c_void, extern "C" fn() -> c_int>(on_to(c"ibv_fork_init")) };
    f()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_list(len: *mut c_int) -> *mut *mut c_void {
    type F = extern "C" fn(*mut c_int) -> *mut *mut c_void;
    // SAFETY: the function of that name has this signature.
    let f = unsafe { transmute::<*mut c_void, F>(on_to(c"ibv_get_device_list")) };
    f(len)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_open_device(device: *mut c_void) -> *mut c_void {
    // SAFETY: the function of that name has this signature.
    let f = unsafe { transmute::<*mut c_void, extern "C" fn(*mut c_void) -> *mut c_void>(on_to(c"ibv_open_device")) };
    f(device)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_mr(pd: *mut c_void, addr: *mut c_void, len: usize, access: c_int) -> *mut c_void {
    type F = extern "C" fn(*mut c_void, *mut c_void, usize, c_int) -> *mut c_void;
    // SAFETY: the function of that name has this signature.
    let f = unsafe { transmute::<*mut c_void, F>(on_to(c"ibv_reg_mr")) };
    f(pd, addr, len, access)
}

/// What was called since the last time.
fn calls() -> Vec<&'static str> {
    std::mem::take(&mut *CALLS.lock().unwrap())
}

#[test]
fn configuration_then_fork_init_then_devices_then_memory() {
    let mut registry = Registry::new();
    ib::component::register(&mut registry);
    let component = registry.components().iter().find(|c| c.name() == "ib").expect("the component").clone();

    let wrong = Env::empty().with("UCX_IB_FORK_INIT", "perhaps");
    let e = component.devices(&wrong).expect_err("a value that does not parse");
    assert!(e.to_string().contains("UCX_IB_FORK_INIT=perhaps"), "{e}");
    assert!(component.open("rxe0", &wrong).is_err());
    assert_eq!(calls(), [""; 0], "no call before the configuration is read");

    let env = Env::empty().with("UCX_IB_FORK_INIT", "y");
    let devices = component.devices(&env).unwrap();
    let listed = calls();
    assert_eq!(listed.first(), Some(&"ibv_fork_init"), "{listed:?}");
    assert!(listed.contains(&"ibv_get_device_list"), "{listed:?}");
    let _ = component.devices(&env).unwrap();
    assert!(!calls().contains(&"ibv_fork_init"), "once in a process");

    let Some(device) = devices.iter().find(|d| d.unusable.is_none() && !d.name.starts_with("soft")) else {
        return println!("no RDMA device here: opening is not looked at");
    };
    let md = component.open(&device.name, &env).unwrap().as_any().downcast::<Md<RdmaDevice>>().unwrap();
    let (arena, bufs) = Arena::new(ArenaLayout { count: 1, len: 64, front: 0, align: 64, align_offset: 0 }).unwrap();
    let keys = md.device().reg_mr(arena.block(), Access::LOCAL_WRITE).unwrap();
    drop(bufs);
    md.device().dereg_mr(keys).unwrap();
    let opened = calls();
    let at = |name| opened.iter().position(|c| *c == name).unwrap_or_else(|| panic!("no {name} in {opened:?}"));
    assert!(at("ibv_get_device_list") < at("ibv_open_device") && at("ibv_open_device") < at("ibv_reg_mr"));
}
