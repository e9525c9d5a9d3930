//! stub
#[derive(Debug)]
/// x
pub struct Env;
